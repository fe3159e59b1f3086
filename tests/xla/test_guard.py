"""Steps that are not finite, and checksums, on an XLA device: no bit of a weight, no further graph, the CPU's sums."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.common.errors import HangError, NxtrainError
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.signals import Signals
from nxtrain.common.testing.fault_kinds import flip
from nxtrain.config.check import Resolved
from nxtrain.metrics.run_observer import Observers, RunObserver, Work
from nxtrain.optim.schedule import Schedule
from nxtrain.train import graph_extraction
from nxtrain.train.build import build_mesh, build_model, build_state
from nxtrain.train.health.numerics import NumericsGuard
from nxtrain.train.health.recompiles import WARM_UP, Recompiles
from nxtrain.train.health.replica_check import ReplicaCheck, checksums, factors
from nxtrain.train.step import TrainState, train_step
from nxtrain.train.supervision.watchdog import Watchdog
from tests.support.models import changed, random, tokens, weights_of
from tests.support.parity import GLOBAL_BATCH, LR, batches, layout, local_batch, start
from tests.support.runs import run_plan, token_file
from tests.support.xla_bodies import Counts
from tests.support.xla_engine import run_devices, start_devices


@dataclass(frozen=True)
class Skipping:
    """A run whose third and fourth steps are bad."""

    changed: list[list[str]]
    history: list[list[float]]
    compiled: list[int]
    fallbacks: tuple[str, ...]


def skipping(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Skipping:
    """Take six steps; in the bad ones one weight is NaN or infinite, and right again after them."""
    state = start(backend, resolved, weights)
    batch = local_batch(state, tokens(resolved, GLOBAL_BATCH), resolved.config.train.micro_batch)
    norm = dict(state.model.named_parameters())["model.norm.weight"]
    changed, compiled = [], []
    for step in range(1, 7):
        right = norm.detach().cpu()
        if step in {3, 4}:
            wrong = right.clone()
            wrong[0] = float("nan" if step == 3 else "inf")
            with torch.no_grad():
                norm.copy_(backend.put(wrong))
        backend.step_boundary()
        before, counted = _held(state), Counts.now().compiled
        train_step(state, batch, LR)
        backend.step_boundary()
        compiled.append(Counts.now().compiled - counted)
        after = _held(state)
        changed.append([name for name, x in before.items() if not torch.equal(x, after[name])])
        if step in {3, 4}:
            with torch.no_grad():
                norm.copy_(backend.put(right))
    backend.step_boundary()
    return Skipping(changed, state.history.entries.cpu().tolist(), compiled, Counts.now().fallbacks)


def skippings(backend: Backend, cases: list[tuple[Resolved, Mapping[str, Tensor]]]) -> list[Skipping]:
    return [skipping(backend, *case) for case in cases]


def _held(state: TrainState) -> dict[str, Tensor]:
    kinds: dict[str, Mapping[str, Tensor]] = {"param": dict(state.model.named_parameters()), **state.optimizer.state}
    if state.layout.mesh.shard_size > 1:
        kinds["shard"] = dict(state.data_parallel.shards)
    bits = {2: torch.int16, 4: torch.int32}
    return {
        f"{kind} {name}": x.detach().cpu().view(bits[x.dtype.itemsize])
        for kind, tensors in kinds.items()
        for name, x in tensors.items()
    }


def summed(backend: Backend, tensors: Mapping[str, Tensor]) -> list[int]:
    there = {name: backend.put(x) for name, x in tensors.items()}
    result = checksums(there, backend.kernels, backend.put(factors(64)))
    backend.step_boundary()
    assert not Counts.now().fallbacks
    return [int(number) for number in result.cpu()]


@dataclass(frozen=True)
class Voted:
    message: str
    compiled: int
    launched: int
    read: int


def voted(backend: Backend, resolved: Resolved, flipped: tuple[int, int] | None = None) -> Voted:
    """Train; with a rank and a step at whose vote a bit of that rank's first parameter has turned over."""
    mesh = build_mesh(resolved, backend.world, backend.rank, backend.local_world)
    state = build_state(resolved, build_model(resolved, backend, mesh, init="draw"), backend, mesh)
    backend.step_boundary()
    recompiles = Recompiles(backend, resolved.config.compile.max_recompiles)

    class Flip(RunObserver):
        def enter(self, step: int, work: Work) -> None:
            if work == "vote" and (backend.rank, step) == flipped:
                flip(state.model)

    observers = Observers(recompiles, Flip())
    loop = graph_extraction.trainer(resolved, state, resolved.config, Schedule.constant(1e-3), observers)
    loop = replace(loop, guard=NumericsGuard(resolved.config, state))
    backend.collectives.barrier()
    before, read = Counts.now(), _read()
    message = ""
    backend.collectives.barrier()
    try:
        loop.run(0)
    except NxtrainError as error:
        message = f"{type(error).__name__}: {error}"
    backend.collectives.barrier()
    after = Counts.now()
    result = Voted(message, after.compiled - before.compiled, after.launched - before.launched, _read() - read)
    backend.collectives.barrier()  # the next run counts for itself
    return result


def votes(backend: Backend, cases: Sequence[tuple[Resolved, tuple[int, int] | None]]) -> list[Voted]:
    return [voted(backend, *case) for case in cases]


def _read() -> int:
    import torch_xla.debug.metrics as met

    result = met.metric_data("TransferFromDeviceTime")
    return int(result[0]) if result else 0


def hung(backend: Backend, logs: Path) -> None:
    """Wait on the device for the last rank, which never comes, with a watchdog beside the first."""
    axis = Mesh.build(backend.world, backend.rank).dp
    mine = backend.put(torch.ones(2))
    if backend.rank == backend.world - 1:
        time.sleep(60.0)
    watchdog = Watchdog(backend, 1.5, logs, Signals())
    for step in range(1, WARM_UP + 2):  # what may still compile has longer
        watchdog.enter(step, "training")
    with watchdog if backend.rank == 0 else nullcontext():
        backend.fetch({"sum": backend.collectives.all_reduce(mine, axis).sum()})


def compared(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], flips: Sequence[tuple[int, str]]
) -> tuple[list[list[str]], list[int]]:
    """Findings of the vote on sound copies after a step, and with a bit turned over in each of some parameters."""
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), LR)
    backend.step_boundary()
    vote = ReplicaCheck(state)
    assert vote.is_possible
    words, compiled = [], []
    for rank, name in [(-1, ""), *flips]:
        right = None
        if rank == backend.rank:
            parameter = dict(state.model.named_parameters())[name]
            right = parameter.detach().cpu()
            _set(backend, parameter, _with_another_bit(right))
        backend.collectives.barrier()
        before = Counts.now().compiled
        backend.collectives.barrier()
        of_all, differing = vote.gather()
        number = backend.fetch({"differing": differing})["differing"]
        backend.collectives.barrier()
        compiled.append(Counts.now().compiled - before)
        words.append([str(result) for result in vote.mismatches(of_all)] or ["elsewhere"] * bool(number))
        if right is not None:
            _set(backend, parameter, right)
    assert not Counts.now().fallbacks
    return words, compiled


def _with_another_bit(x: Tensor) -> Tensor:
    bits = x.view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize]).clone()
    bits[-1:] ^= 1
    return bits.view(x.dtype)


def _set(backend: Backend, parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(backend.put(value))
    backend.step_boundary()


WORLD = 3
"""So that there is a majority."""

SPOILED = "param model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
RULES: list[dict[str, Any]] = [
    {"params": "fp32", "update": "fp32"},
    {"params": "bf16", "update": "fp32_master"},
    {"params": "bf16", "update": "bf16_stochastic"},
    {"params": "bf16", "update": "bf16_kahan"},
]


def check(course: Skipping) -> None:
    """Bad steps change nothing, but that the weight by which they are bad may be set right from what is kept of it."""
    changes = [{name for name in names if name != SPOILED} for names in course.changed]
    assert [bool(names) for names in changes] == [True, True, False, False, True, True], course
    assert [all(map(math.isfinite, step)) for step in course.history[-6:]] == [True, True, False, False, True, True]


def test_a_bad_step_changes_no_bit_under_any_rule_and_is_the_graph_of_the_others(tmp_path: Path) -> None:
    plans = [layout("gqa2", tp=1, micro=4, **rule) for rule in RULES]
    plans.append(changed(plans[-1], precision={"state": "bf16"}))
    (result,) = run_devices(1, skippings, [(plan, weights_of(plan)) for plan in plans], folder=tmp_path)
    for rule, course in zip([*RULES, "kahan, bf16 state"], result, strict=True):
        check(course)
        assert sum(course.compiled) == course.compiled[0] == 1, rule
        assert course.fallbacks == ()


def test_bad_steps_of_two_ranks_with_cut_state_change_no_bit(tmp_path: Path) -> None:
    plan = layout("gqa2", tp=1, dp=2, micro=2, shard="zero1", params="bf16", update="bf16_kahan")
    for (course,) in run_devices(2, skippings, [(plan, weights_of(plan))], folder=tmp_path):
        check(course)


def test_a_vote_finds_the_one_replica_with_another_bit_for_one_graph_and_one_read(tmp_path: Path) -> None:
    """Of three runs on one process, so that what the first has compiled the others do not."""
    data = {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", 40))}

    def plan(name: str, vote_every: int) -> Resolved:
        return run_plan(
            tmp_path / name,
            data,
            steps=8,
            train={"global_batch": WORLD, "micro_batch": 1},
            parallel={"tp": 1, "dp": WORLD},
            metrics={"log_every": 3},
            checkpoint={"every": 0},
            compile={"max_recompiles": 0},
            recovery={"vote_every": vote_every},
        )

    cases = [(plan("unvoted", 0), None), (plan("voted", 2), None), (plan("flipped", 2), (1, 4))]
    by_rank: list[list[Voted]] = run_devices(WORLD, votes, cases, folder=tmp_path)
    for rank, (unvoted, sound, flipped) in enumerate(by_rank):
        assert unvoted.message == sound.message == ""
        assert unvoted.compiled > 1
        assert sound.compiled == 1
        assert flipped.compiled == 0
        num_votes = WORLD * 8 // 2
        assert sound.launched - unvoted.launched == num_votes
        assert sound.read - unvoted.read == num_votes
        named = "rank 1 differs from ranks 0 and 2 in model.embed_tokens.weight"
        assert flipped.message.startswith(
            f"RestartError: step 4: the replicas of the model are no longer equal: {named}. "
        )
        assert by_rank[rank][0] == by_rank[0][0]
    (noted,) = (tmp_path / "flipped/logs/votes.jsonl").read_text().splitlines()
    assert json.loads(noted) == {"step": 4, "ranks": [1], "tensors": ["model.embed_tokens.weight"], "attempt": 0}


@pytest.mark.parametrize(
    ("cuts", "flips", "words"),
    [
        (
            {"tp": 2, "pp": 2, "sp": True, "config": {"num_key_value_heads": 1}},
            [(3, "lm_head.weight"), (2, "model.norm.weight"), (1, "model.layers.0.self_attn.qkv_proj.weight")],
            [
                (EMBEDDING, 1, 3),
                ("model.norm.weight", 2, 3),
                ("model.layers.0.self_attn.qkv_proj.weight (2 copies over tp)", 0, 1),
            ],
        ),
        (
            {"tp": 1, "pp": 2, "dp": 2, "shard": "zero1"},
            [(3, "lm_head.weight")],
            [f"rank 3 differs from ranks 0, 1 and 2 in {EMBEDDING}"],
        ),
    ],
    ids=["tp2-pp2", "zero1"],
)
def test_copies_within_a_model_are_compared_by_graphs_that_are_known_after_the_first_vote(
    cuts: dict[str, Any], flips: list[tuple[int, str]], words: list[Any], tmp_path: Path
) -> None:
    """Of a tied embedding over the stages, of norm weights and K/V heads over tp."""
    resolved = layout("tied", micro=1, params="bf16", update="bf16_stochastic", **cuts)
    world = cuts["tp"] * cuts["pp"] * cuts.get("dp", 1)
    by_rank = run_devices(world, compared, resolved, weights_of(resolved), flips, folder=tmp_path)
    for rank, (said, compiled) in enumerate(by_rank):
        sound, *actual = said
        assert sound == []
        assert compiled[0] > 0
        assert compiled[1:] == [0] * len(flips)
        for text, want in zip(actual, words, strict=True):
            if isinstance(want, str):
                assert text == [want]
                continue
            name, *pair = want
            message = f"ranks {pair[0]} and {pair[1]} differ in {name}, and no majority tells which is right"
            assert text == [message if rank in pair else "elsewhere"]


def test_a_rank_that_waits_for_another_on_the_device_is_ended_by_its_watchdog(tmp_path: Path) -> None:
    """Else XLA:CPU would end the process after ten seconds, and an accelerator never."""
    done = start_devices(2, hung, tmp_path / "logs", folder=tmp_path)
    assert done.code == HangError.exit_code, done.printed[-3000:]
    assert "did not get on within recovery.hang_timeout_s=1.5 seconds: step 3 (training)" in done.printed
    stacks = (tmp_path / "logs/hang-rank-0.txt").read_text(encoding="utf-8")
    assert re.search(r"xla/backend\.py\", line \d+ in fetch", stacks), stacks


def test_checksums_are_those_of_the_cpu(tmp_path: Path) -> None:
    tensors = {"a": random(33, 17), "b": random(7).to(torch.bfloat16), "c": random(3, 4, 5), "d": -random(2, 2)}
    ((result),) = run_devices(1, summed, tensors, folder=tmp_path)
    assert result == checksums(tensors, CpuKernels(), factors(64)).tolist()
