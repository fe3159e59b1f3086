"""Graphs of a run: one per step, whatever changes from step to step or from rank to rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nxtrain.config.check import Resolved
from nxtrain.config.rule_schedules import BetaPiece, DecayPiece
from nxtrain.tools.trace.hlo import parse
from tests.support.lora import adapters_of
from tests.support.models import changed, weights_of
from tests.support.parity import OPTIM, layout
from tests.support.xla_bodies import Recorded, Steps, all_steps, recorded
from tests.support.xla_engine import run_devices

RATES = [0.0, 1e-3, 1.0, 0.5, OPTIM["weight_decay"], OPTIM["betas"][0]]
"""Values that XLA would fold into constants, or unite with others, if they came as numbers."""

EXPERTS: dict[str, Any] = {"family": "mixtral", "config": {"num_local_experts": 5, "intermediate_size": 24}}
SOUND: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, accumulated": {"params": "bf16", "micro": 2},
    "stochastic": {"params": "bf16", "update": "bf16_stochastic"},
    "kahan, numbers that change": {"params": "bf16", "update": "bf16_kahan"},
    "experts": {**EXPERTS, "micro": 2},
    "experts with a capacity": {**EXPERTS, "moe_dispatch": "capacity", "moe_capacity_factor": 1.0, "remat": "full"},
    "masks of adapters": {"params": "bf16", "micro": 1, "remat": "full"},
}
CHANGES: dict[str, Any] = {
    "weight_decay_schedule": "corrected",
    "weight_decay_pieces": [DecayPiece(steps=2, to=0.0)],
    "beta2_pieces": [BetaPiece(steps=4, to=0.99)],
}
MASKS = {"method": "lora", "r": 2, "dropout": 0.5}
MUTANTS = {"lr": [1e-3, 1.0], "read": [1e-3]}  # learning rates


def weights(resolved: Resolved) -> dict[str, Tensor]:
    """Whole weights, with those of adapters if the run trains them."""
    base = weights_of(resolved)
    return {**base, **adapters_of(resolved, base)} if resolved.config.finetune.adapts else base


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    """Steps of sound runs and of mutants, one after the other in one process."""
    sound = [layout("gqa2", tp=1, **options) for options in SOUND.values()]
    sound[-1] = changed(sound[-1], finetune=MASKS)
    sound[3] = changed(sound[3], optim=CHANGES)
    runs = [(changed(run, precision={"state": run.config.precision.params}), RATES, "") for run in sound]
    runs += [(layout("gqa2", tp=1), rates, mutant) for mutant, rates in MUTANTS.items()]
    cases = [(run, weights(run), rates, mutant) for run, rates, mutant in runs]
    (result,) = run_devices(1, all_steps, cases, folder=tmp_path_factory.mktemp("one"))
    return dict(zip([*SOUND, *MUTANTS], result, strict=True))


@pytest.mark.parametrize("case", SOUND)
def test_every_step_from_the_first_is_the_same_graphs_and_reads_nothing(
    case: str, on_one_device: dict[str, Steps]
) -> None:
    steps = on_one_device[case]
    micro_batches = 4 // SOUND[case].get("micro", 4)
    distinct, launched = (2, micro_batches + 1) if micro_batches > 1 else (1, 1)
    assert steps.refusal == ""
    assert steps.compiled == [distinct] * len(RATES)
    assert steps.launched == [launched * step for step in range(1, len(RATES) + 1)]
    assert steps.fallbacks == ()


def test_a_learning_rate_that_is_a_number_would_be_noticed(on_one_device: dict[str, Steps]) -> None:
    assert on_one_device["lr"].compiled == [1, 2]


def test_a_read_inside_the_step_would_be_noticed(on_one_device: dict[str, Steps]) -> None:
    assert "execution" in on_one_device["read"].refusal


def record(
    ranks: list[int], folder: Path, mutant: str = "", accumulation: int = 2, *, masks: bool = False, **options: Any
) -> list[list[Recorded]]:
    """The graphs of two steps of ranks of 4096: tp 8 with sequence parallelism, dp 512, 4 copies of the K/V heads."""
    resolved = layout("gqa2", **{"tp": 8, "dp": 512, "sp": True, "micro": 1, **options})
    resolved = changed(
        resolved, train={"global_batch": resolved.config.parallel.dp * accumulation}, finetune=MASKS if masks else {}
    )
    (result,) = run_devices(1, recorded, resolved, weights(resolved), 4096, ranks, mutant, folder=folder)
    return result  # type: ignore[no-any-return]


def census(text: str) -> Counter[tuple[str, int, int]]:
    """Count of each collective in a graph, by number of groups and of ranks in a group."""
    result = parse(text).collectives
    return Counter((item.op, len(item.groups), len(item.groups[0])) for item in result)


BLOCKS = 2
MICRO_STEP = Counter(
    {
        # A block enters tensor parallelism twice forward and twice backward, and gathers its two inputs again for the
        # gradients of their weights; the head enters once, and the embedding once, backward.
        ("all-gather", 512, 8): BLOCKS * (2 + 2 + 2) + 2,
        # What enters forward leaves backward, and the other way round: all of the above but the inputs' second time.
        ("reduce-scatter", 512, 8): BLOCKS * (2 + 2) + 2,
        # The largest logit and the sums over the vocabulary.
        ("all-reduce", 512, 8): 2,
    }
)
UPDATE = Counter(
    {
        # The norms' gradients; the global norm.
        ("all-reduce", 512, 8): 2,
        # The K/V heads' gradients, between the ranks that share one.
        ("all-reduce", 1024, 4): 1,
        # The loss with the number of tokens; the gradients, in one bucket.
        ("all-reduce", 8, 512): 2,
    }
)


def hashes(graphs: list[Recorded]) -> list[str]:
    return [graph.hash for graph in graphs]


def shared_by(by_rank: list[list[Recorded]]) -> tuple[Recorded, Recorded]:
    """The graphs of a micro-batch and of an update, which are all that any rank records in two steps."""
    micro, _, update = by_rank[0][:3]
    for graphs in by_rank:
        assert hashes(graphs) == [micro.hash, micro.hash, update.hash] * 2
    return micro, update


def test_all_ranks_of_4096_record_a_graph_per_micro_batch_and_one_to_update(tmp_path: Path) -> None:
    by_rank = record([0, 1, 7, 8, 3001, 4095], tmp_path)
    micro, update = shared_by(by_rank)
    assert census(micro.text) == MICRO_STEP
    assert census(update.text) == UPDATE
    assert "f64[" not in micro.text + update.text
    # Mean gradients over dp: 1/512 stands in the graph, and 1/4096 does not.
    assert f"constant({1 / 512})" in update.text
    assert str(1 / 4096) not in update.text


CONTEXT: dict[str, Any] = {"dp": 128, "cp": 4, "seq_len": 64}
OF_ALL_CP_RANKS = [0, 1, 8, 9, 16, 24, 3001, 4095]


@pytest.mark.parametrize("cp_layout", ["zigzag", "striped", pytest.param("contiguous", marks=pytest.mark.slow)])
def test_all_context_parallel_ranks_record_the_same_graphs(tmp_path: Path, cp_layout: str) -> None:
    """Keys and values are gathered once forward and once backward, and their gradients scattered as sums."""
    by_rank = record(OF_ALL_CP_RANKS, tmp_path, **CONTEXT, cp_layout=cp_layout)
    micro, update = shared_by(by_rank)
    gathers = {("all-gather", 1024, 4): 2 * BLOCKS, ("reduce-scatter", 1024, 4): BLOCKS}
    assert census(micro.text) == MICRO_STEP + Counter(gathers)
    assert f"constant({1 / 512})" in update.text, "mean gradients over dp x cp"


def test_a_position_that_is_a_number_would_be_noticed(tmp_path: Path) -> None:
    by_rank = record([0, 8], tmp_path, "position number", **CONTEXT, cp_layout="contiguous")
    assert hashes(by_rank[0])[0] != hashes(by_rank[1])[0]


def test_masks_of_adapters_are_values_in_graphs_that_all_ranks_share(tmp_path: Path) -> None:
    """No number of a rank, of a step or of a micro-batch is part of a graph."""
    by_rank = record([0, 1, 8, 3001], tmp_path, masks=True, remat="full")
    micro, update = shared_by(by_rank)
    assert "f64[" not in micro.text + update.text


@pytest.mark.parametrize("sp", [True, False])
def test_all_ranks_of_a_model_with_experts_record_the_same_graphs(tmp_path: Path, sp: bool) -> None:
    """The statistics of all routers are summed once for a micro-batch; a token's experts are gathered in each block."""
    by_rank = record([0, 1, 8, 3001], tmp_path, **EXPERTS, sp=sp)
    micro, _ = shared_by(by_rank)
    result = census(micro.text)
    if not sp:
        assert result["all-reduce", 8, 512] == 1
        return
    # Weights and indices forward, the gradient of the weights backward; an input is not gathered again.
    own = {("all-reduce", 1, 4096): 1, ("all-gather", 512, 8): BLOCKS, ("reduce-scatter", 512, 8): BLOCKS}
    assert result == MICRO_STEP + Counter(own)


def test_graphs_do_not_change_with_accumulation_and_are_one_without(tmp_path: Path) -> None:
    for accumulation in (1, 2, 3):
        (tmp_path / str(accumulation)).mkdir()
    alone, two, three = (record([0], tmp_path / str(n), accumulation=n)[0] for n in (1, 2, 3))
    micro, update = hashes(two)[1:3]
    assert hashes(three) == [micro, micro, micro, update] * 2
    assert len(alone) == len({*hashes(alone)}) + 1 == 2
    assert census(alone[0].text) == MICRO_STEP + UPDATE


def test_zero1_over_4096_ranks_scatters_gathers_and_divides_by_dp(tmp_path: Path) -> None:
    by_rank = record([0, 1, 8, 3001], tmp_path, shard="zero1", params="bf16", update="bf16_stochastic")
    micro, update = shared_by(by_rank)
    assert census(micro.text) == MICRO_STEP
    result = census(update.text)
    assert result - UPDATE == {
        ("reduce-scatter", 8, 512): 1,  # the gradients, in one bucket after the last micro-batch
        ("all-gather", 8, 512): 1,  # the new parameters
        ("all-reduce", 1, 4096): 1,  # the norm, over all that hold a part of the state
    }
    assert UPDATE - result == {("all-reduce", 8, 512): 1, ("all-reduce", 512, 8): 1}
    lines = update.text.splitlines()
    (scatter,) = [line for line in lines if " reduce-scatter(" in line]
    name = scatter.split(" = ")[0].split()[-1]
    users = [line for line in lines if f"{name})" in line or f"{name}," in line]
    assert users and all(" multiply(" in user for user in users), users
    assert f"constant({1 / 512})" in update.text
    assert str(1 / 4096) not in update.text


def test_a_rank_that_stands_in_the_graph_as_a_number_would_be_noticed(tmp_path: Path) -> None:
    first, second = record([0, 1], tmp_path, mutant="number")
    assert first[0].hash != second[0].hash
