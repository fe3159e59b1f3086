"""Steps that are not finite, and checksums, on an XLA device: no bit of a weight, no further graph, the CPU's sums."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.common.errors import HangError
from nxtrain.config.check import Resolved
from nxtrain.train.health.replica_check import checksums, factors
from tests.support.layers import random
from tests.support.models import changed, weights_of
from tests.support.parity import layout
from tests.support.runs import run_plan, token_file
from tests.support.xla_engine import run_devices, start_devices
from tests.support.xla_guard import Skipping, Voted, compared, hung, skippings, summed, votes

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
    (found,) = run_devices(1, skippings, [(plan, weights_of(plan)) for plan in plans], folder=tmp_path)
    for rule, course in zip([*RULES, "kahan, bf16 state"], found, strict=True):
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
        assert unvoted.told == sound.told == ""
        assert unvoted.compiled > 1
        assert sound.compiled == 1
        assert flipped.compiled == 0
        num_votes = WORLD * 8 // 2
        assert sound.launched - unvoted.launched == num_votes
        assert sound.read - unvoted.read == num_votes
        named = "rank 1 differs from ranks 0 and 2 in model.embed_tokens.weight"
        assert flipped.told.startswith(
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
        sound, *found = said
        assert sound == []
        assert compiled[0] > 0
        assert compiled[1:] == [0] * len(flips)
        for text, want in zip(found, words, strict=True):
            if isinstance(want, str):
                assert text == [want]
                continue
            name, *pair = want
            told = f"ranks {pair[0]} and {pair[1]} differ in {name}, and no majority tells which is right"
            assert text == [told if rank in pair else "elsewhere"]


def test_a_rank_that_waits_for_another_on_the_device_is_ended_by_its_watchdog(tmp_path: Path) -> None:
    """Else XLA:CPU would end the process after ten seconds, and an accelerator never."""
    done = start_devices(2, hung, tmp_path / "logs", folder=tmp_path)
    assert done.code == HangError.exit_code, done.printed[-3000:]
    assert "did not get on within recovery.hang_timeout_s=1.5 seconds: step 3 (training)" in done.printed
    stacks = (tmp_path / "logs/hang-rank-0.txt").read_text(encoding="utf-8")
    assert re.search(r"xla/backend\.py\", line \d+ in fetch", stacks), stacks


def test_checksums_are_those_of_the_cpu(tmp_path: Path) -> None:
    tensors = {"a": random(33, 17), "b": random(7).to(torch.bfloat16), "c": random(3, 4, 5), "d": -random(2, 2)}
    ((found),) = run_devices(1, summed, tensors, folder=tmp_path)
    assert found == checksums(tensors, CpuKernels(), factors(64)).tolist()
