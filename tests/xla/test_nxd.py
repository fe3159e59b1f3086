"""The layers of NeuronX Distributed on XLA: the same steps, and graphs with the same collectives as the native ones.

`tests/support/nxd_cpu.py` says how to run these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import nxd_xla
from tests.support.models import changed, weights_of
from tests.support.parity import check_course, layout, reference
from tests.support.xla_bodies import Recorded, recorded
from tests.support.xla_engine import run_devices
from tests.xla.test_graphs import census

pytestmark = pytest.mark.nxd

STEPS = 6
RANKS = [0, 1, 3001]


@pytest.mark.parametrize(
    "cases",
    [
        [("gqa2", 2, 1, False, 4, "none"), ("odd", 2, 1, True, 4, "none"), ("tied", 2, 1, False, 2, "none")],
        [("gqa2", 2, 1, False, 4, "full"), ("odd", 2, 1, True, 2, "full"), ("gqa2", 2, 1, True, 4, "selective")],
        # Averaged by bucket_allreduce_gradients.
        [("gqa2", 1, 2, False, 2, "none"), ("gqa2", 1, 2, False, 1, "full")],
    ],
    ids=["tp 2", "tp 2 recomputed", "dp 2"],
)
def test_steps_on_two_devices_equal_transformers(
    cases: list[tuple[str, int, int, bool, int, str]], tmp_path: Path
) -> None:
    runs = [layout(shape, tp=tp, dp=dp, sp=sp, micro=micro, remat=remat) for shape, tp, dp, sp, micro, remat in cases]
    by_rank = run_devices(2, nxd_xla.courses, [(run, weights_of(run)) for run in runs], STEPS, folder=tmp_path)
    for run, (shape, *_), found in zip(runs, cases, zip(*by_rank, strict=True), strict=True):
        check_course(found, reference(layout(shape, tp=1), STEPS), run)


def record(
    folder: Path, layers: str, *, sp: bool, mutant: str = "", params: str = "fp32", remat: str = "none"
) -> list[list[Recorded]]:
    """The graphs of two steps of ranks of 4096: tp 8, dp 512, 4 copies of the K/V heads, two micro-batches."""
    resolved = layout("gqa2", tp=8, dp=512, sp=sp, micro=1, params=params, remat=remat)
    resolved = changed(resolved, train={"global_batch": 1024})
    job = (recorded, resolved, weights_of(resolved), 4096, RANKS, mutant, layers)
    (found,) = run_devices(1, *job, folder=folder)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("sp", "params", "remat"), [(True, "bf16", "none"), (False, "fp32", "none"), (True, "bf16", "full")]
)
def test_all_ranks_record_the_same_graphs_with_the_collectives_of_the_native_layers(
    sp: bool, params: str, remat: str, tmp_path: Path
) -> None:
    native, nxd = (record(tmp_path, layers, sp=sp, params=params, remat=remat) for layers in ("native", "nxd"))
    assert all([graph.hash for graph in rank] == [graph.hash for graph in nxd[0]] for rank in nxd)
    assert len({graph.hash for graph in nxd[0]}) == 2
    assert nxd[0][0].hash != native[0][0].hash
    assert [census(graph.text) for graph in nxd[0]] == [census(graph.text) for graph in native[0]]


def test_a_rank_that_is_a_number_would_be_noticed(tmp_path: Path) -> None:
    first, second, _ = record(tmp_path, "nxd", sp=True, mutant="nxd number")
    assert first[0].hash != second[0].hash


def steady(report: dict[str, Any]) -> dict[str, str]:
    """The graphs of training, by name."""
    assert (report["problems"], report["host_reads"]) == ([], [])
    return {graph["name"]: graph["hash"] for graph in report["graphs"] if graph["name"].startswith("steady")}


def test_graphs_are_traced_as_a_run_of_two_devices_has_them(tmp_path: Path) -> None:
    plans = [
        layout("gqa2", tp=2, micro=2),
        layout("tied", tp=2, sp=True, micro=2),
        layout("gqa2", tp=2, sp=True, params="bf16", update="bf16_stochastic", remat="selective", micro=2),
    ]
    by_rank = run_devices(2, nxd_xla.hashes_of_runs, plans, 2, folder=tmp_path)
    (reports,) = run_devices(1, nxd_xla.traced, plans, 2, [0, 1], "trn1.32xlarge", folder=tmp_path)
    for plan, report, *runs in zip(plans, reports, *by_rank, strict=True):
        found = steady(report)
        accumulation = plan.config.train.global_batch // plan.config.train.micro_batch
        expected = [*[found["steady micro-batch"]] * accumulation, found["steady update"]]
        assert runs == [expected * 2] * 2


@pytest.mark.parametrize(("pair", "taken"), [([0, 1], 1.0), ([1, 0], 0.0)])
def test_nxd_4_17_a_pair_that_is_named_downwards_receives_its_own_zeros(
    pair: list[int], taken: float, tmp_path: Path
) -> None:
    """XLA gathers in the order in which a group is named; NxD's pipeline looks in the order of the ranks.

    It names pairs downwards where the last rank sends to the first, as the interleaved schedule does, and on a trn2
    whose tensor parallelism takes half a node. Whether Neuron's own collectives keep XLA's order is not known here.
    """
    for gathered, found in run_devices(2, nxd_xla.received, pair, folder=tmp_path):
        assert gathered == [float(rank) for rank in pair]
        assert found == [taken]
