"""Recomputation in an XLA graph: barriers that keep the compiler from undoing it, and graphs that stay the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from tests.support.models import changed, weights_of
from tests.support.parity import layout
from tests.support.xla_bodies import Recorded, recorded, steps
from tests.support.xla_engine import run_devices

POLICIES = ("none", "selective", "full")
BLOCKS = 2


def record_each(backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor]]]) -> list[list[list[Recorded]]]:
    """Two steps of two ranks of 4096, of each case."""
    return [recorded(backend, resolved, weights, 4096, [0, 4095], "") for resolved, weights in cases]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A micro-batch's graph of each policy at tp 8 with sequence parallelism, dp 512."""
    plans = [layout("gqa2", tp=8, dp=512, sp=True, micro=1, remat=remat) for remat in POLICIES]
    plans = [changed(resolved, train={"global_batch": 1024}) for resolved in plans]
    cases = [(resolved, weights_of(resolved)) for resolved in plans]
    (result,) = run_devices(1, record_each, cases, folder=tmp_path_factory.mktemp("graphs"))
    for first, last in result:
        assert first == last
        micro, again, update = (graph.hash for graph in first[:3])
        assert micro == again != update
    return {remat: first[0].text for remat, (first, _) in zip(POLICIES, result, strict=True)}


@pytest.mark.parametrize("remat", POLICIES)
def test_each_recomputed_part_begins_behind_a_barrier(texts: dict[str, str], remat: str) -> None:
    expected = 0 if remat == "none" else BLOCKS
    assert len(re.findall(r" opt-barrier\(", texts[remat])) == expected


def test_a_block_in_the_graph_communicates_again_like_its_forward_pass(texts: dict[str, str]) -> None:
    counts = {
        remat: Counter(re.findall(r" (all-reduce|all-gather|reduce-scatter)\(", text)) for remat, text in texts.items()
    }
    assert counts["selective"] == counts["none"]
    # Two halves, each in and out: nothing stops the second call before its last sum, whose result no gradient needs.
    again = BLOCKS * 2
    assert counts["full"] == counts["none"] + Counter({"all-gather": again, "reduce-scatter": again})


def test_a_recomputing_step_is_two_graphs_and_reads_nothing(tmp_path: Path) -> None:
    resolved = layout("gqa2", tp=1, params="bf16", micro=2, remat="full")
    rates = [0.0, 1e-3, 1.0]
    (result,) = run_devices(1, steps, resolved, weights_of(resolved), rates, "", folder=tmp_path)
    assert result.refusal == ""
    assert result.compiled == [2] * len(rates)
    assert result.launched == [3 * step for step in range(1, len(rates) + 1)]
    assert result.fallbacks == ()
