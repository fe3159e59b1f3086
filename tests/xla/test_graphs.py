"""What a compiler sees: one graph per step, whatever changes from step to step or from rank to rank."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import changed, weights_of
from tests.support.parity import OPTIM, layout
from tests.support.xla_bodies import Recorded, Steps, all_steps, recorded
from tests.support.xla_engine import run_devices

RATES = [0.0, 1e-3, 1.0, 0.5, OPTIM["weight_decay"], OPTIM["betas"][0], 1e-3, 0.0]
"""Values that XLA would fold into constants, or unite with others, if they came as numbers."""

SOUND: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, accumulated": {"params": "bf16", "micro": 2},
    "stochastic": {"params": "bf16", "update": "bf16_stochastic"},
    "kahan": {"params": "bf16", "update": "bf16_kahan"},
}
MUTANTS = {"lr": [1e-3, 1.0], "read": [1e-3]}  # learning rates


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    """Steps of sound runs and of mutants, one after the other in one process."""
    sound = [layout("gqa2", tp=1, **options) for options in SOUND.values()]
    runs = [(changed(run, precision={"state": run.config.precision.params}), RATES, "") for run in sound]
    runs += [(layout("gqa2", tp=1), rates, mutant) for mutant, rates in MUTANTS.items()]
    cases = [(run, weights_of(run), rates, mutant) for run, rates, mutant in runs]
    (found,) = run_devices(1, all_steps, cases, folder=tmp_path_factory.mktemp("one"))
    return dict(zip([*SOUND, *MUTANTS], found, strict=True))


@pytest.mark.parametrize("case", SOUND)
def test_every_step_from_the_first_is_the_same_graph_and_reads_nothing(
    case: str, on_one_device: dict[str, Steps]
) -> None:
    steps = on_one_device[case]
    assert steps.refusal == ""
    assert steps.compiled == [1] * len(RATES)
    assert steps.launched == [*range(1, len(RATES) + 1)]
    assert steps.fallbacks == ()


def test_a_learning_rate_that_is_a_number_would_be_noticed(on_one_device: dict[str, Steps]) -> None:
    assert on_one_device["lr"].compiled == [1, 2]


def test_a_read_inside_the_step_would_be_noticed(on_one_device: dict[str, Steps]) -> None:
    assert "execution" in on_one_device["read"].refusal


def record(ranks: list[int], folder: Path, mutant: str = "", **options: Any) -> list[Recorded]:
    """Steps of ranks of 4096: tp 8 with sequence parallelism, dp 512, two micro-batches, 4 copies of the K/V heads."""
    resolved = changed(layout("gqa2", tp=8, dp=512, sp=True, micro=1, **options), train={"global_batch": 1024})
    (found,) = run_devices(1, recorded, resolved, weights_of(resolved), 4096, ranks, mutant, folder=folder)
    return found  # type: ignore[no-any-return]


def census(text: str) -> Counter[tuple[str, int, int]]:
    """How often each collective stands in a graph over how many groups of how many ranks."""
    found = re.findall(r" (all-reduce|all-gather|reduce-scatter)\(.*?replica_groups=\{\{(.*?)\}\}", text)
    return Counter((kind, len(groups.split("},{")), len(groups.split("},{")[0].split(","))) for kind, groups in found)


def test_all_ranks_of_4096_record_one_graph_with_the_groups_of_the_mesh(tmp_path: Path) -> None:
    steps = record([0, 1, 7, 8, 3001, 4095], tmp_path)
    assert len({step.hash for step in steps}) == 1
    text = steps[0].text
    assert "f64[" not in text
    micro_batches, blocks = 2, 2
    assert census(text) == {
        # A block enters tensor parallelism twice forward and twice backward, and gathers its two inputs again for the
        # gradients of their weights; the head enters once, and the embedding once, backward.
        ("all-gather", 512, 8): micro_batches * (blocks * (2 + 2 + 2) + 2),
        # What enters forward leaves backward, and the other way round: all of the above but the inputs' second time.
        ("reduce-scatter", 512, 8): micro_batches * (blocks * (2 + 2) + 2),
        # The largest logit and the sums over the vocabulary, per micro-batch; the norms' gradients; the global norm.
        ("all-reduce", 512, 8): micro_batches * 2 + 2,
        # The K/V heads' gradients, between the ranks that share one.
        ("all-reduce", 1024, 4): 1,
        # The number of tokens, the gradients in one bucket after the last micro-batch, the loss.
        ("all-reduce", 8, 512): 3,
    }
    # Mean gradients over dp: 1/512 stands in the graph, and 1/4096 does not.
    assert f"constant({1 / 512})" in text
    assert str(1 / 4096) not in text


def test_zero1_over_4096_ranks_scatters_gathers_and_divides_by_dp(tmp_path: Path) -> None:
    (tmp_path / "replicated").mkdir()
    cut = {"params": "bf16", "update": "bf16_stochastic"}
    plain = record([0], tmp_path / "replicated", **cut)[0].text
    steps = record([0, 1, 7, 8, 3001, 4095], tmp_path, shard="zero1", **cut)
    assert len({step.hash for step in steps}) == 1
    text = steps[0].text
    found, replicated = census(text), census(plain)
    assert found - replicated == {
        ("reduce-scatter", 8, 512): 1,  # the gradients, in one bucket after the last micro-batch
        ("all-gather", 8, 512): 1,  # the new parameters
        ("all-reduce", 1, 4096): 1,  # the norm, over all that hold a part of the state
    }
    assert replicated - found == {("all-reduce", 8, 512): 1, ("all-reduce", 512, 8): 1}
    lines = text.splitlines()
    (scatter,) = [line for line in lines if " reduce-scatter(" in line and line.count("},{") == 8 - 1]
    name = scatter.split(" = ")[0].split()[-1]
    users = [line for line in lines if f"{name})" in line or f"{name}," in line]
    assert users and all(" multiply(" in user for user in users), users
    assert f"constant({1 / 512})" in text
    assert str(1 / 4096) not in text


def test_a_rank_that_stands_in_the_graph_as_a_number_would_be_noticed(tmp_path: Path) -> None:
    first, second = (steps.hash for steps in record([0, 1], tmp_path, mutant="number")[::2])
    assert first != second
