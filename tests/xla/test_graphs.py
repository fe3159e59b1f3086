"""What a compiler sees: one graph per step, whatever changes from step to step or from rank to rank."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.models import weights_of
from tests.support.parity import OPTIM, layout
from tests.support.xla_bodies import steady, traced
from tests.support.xla_engine import run_devices

RATES = [0.0, 1e-3, 1.0, 0.5, OPTIM["weight_decay"], OPTIM["betas"][0], 1e-3, 0.0]
"""Values that XLA would fold into constants, or unite with others, if they came as numbers."""


def test_every_step_is_the_same_graph_and_reads_nothing(tmp_path: Path) -> None:
    resolved = layout("gqa2", tp=1)
    (counts,) = run_devices(1, steady, resolved, weights_of(resolved), RATES, "", folder=tmp_path)
    assert [count["compiled"] - counts[0]["compiled"] for count in counts[1:]] == [1] * len(RATES)
    assert [count["executed"] - counts[0]["executed"] for count in counts[1:]] == [*range(1, len(RATES) + 1)]
    assert counts[-1]["fallbacks"] == []


def test_every_step_is_the_same_graph_on_four_devices(tmp_path: Path) -> None:
    resolved = layout("gqa2", tp=2, dp=2, sp=True, micro=2)
    by_rank = run_devices(4, steady, resolved, weights_of(resolved), RATES[:4], "", folder=tmp_path)
    assert by_rank[0][-1]["compiled"] - by_rank[0][0]["compiled"] == 1
    assert by_rank[0][-1]["fallbacks"] == []


def test_a_learning_rate_that_is_a_number_would_be_noticed(tmp_path: Path) -> None:
    resolved = layout("gqa2", tp=1)
    (counts,) = run_devices(1, steady, resolved, weights_of(resolved), RATES, "lr", folder=tmp_path)
    assert counts[-1]["compiled"] - counts[0]["compiled"] > 1


def test_a_read_inside_the_step_would_be_noticed(tmp_path: Path) -> None:
    resolved = layout("gqa2", tp=1)
    with pytest.raises(AssertionError, match="execution"):
        run_devices(1, steady, resolved, weights_of(resolved), RATES, "read", folder=tmp_path)


def test_all_ranks_of_4096_record_one_graph_with_the_groups_of_the_mesh(tmp_path: Path) -> None:
    """tp 8 under sequence parallelism, dp 512, two micro-batches, K/V heads replicated 4 times."""
    resolved = layout("gqa2", tp=8, dp=512, sp=True)
    ranks = [0, 1, 7, 8, 3001, 4095]
    (graphs,) = run_devices(1, traced, resolved, weights_of(resolved), 4096, ranks, folder=tmp_path)
    assert len({graph["hash"] for graph in graphs}) == 1
    text = graphs[0]["text"]
    assert "f64[" not in text
    census = Counter(
        (kind, len(groups.split("},{")), len(groups.split("},{")[0].split(",")))
        for kind, groups in re.findall(
            r" (all-reduce|all-gather|reduce-scatter)\(.*?replica_groups=\{\{(.*?)\}\}", text
        )
    )
    assert {(groups, size) for _, groups, size in census} == {(512, 8), (8, 512), (1024, 4)}
    gathers, scatters = census["all-gather", 512, 8], census["reduce-scatter", 512, 8]
    # A block enters and leaves parallelism twice, forward and backward, and gathers its two inputs again for their
    # weights' gradients; the embedding leaves and the head enters once: 2 micro-batches of 2 blocks.
    assert gathers == 2 * (2 * (2 + 2 + 2) + 2)
    assert scatters == 2 * (2 * (2 + 2) + 2)
    # Mean gradients over dp: 1/512 stands in the graph, and 1/4096 does not.
    assert f"constant({1 / 512})" in text
    assert str(1 / 4096) not in text
