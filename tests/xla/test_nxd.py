"""The layers of NeuronX Distributed on XLA: the same steps, and graphs with the same collectives as the native ones.

`tests/support/nxd_cpu.py` says how to run these.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import nxd_xla
from tests.support.models import changed, weights_of
from tests.support.parity import check_course, layout, reference
from tests.support.xla_bodies import Recorded, recorded
from tests.support.xla_engine import run_devices
from tests.xla.test_graphs import census
from tests.xla.test_graphs_command import ROOT, SHAPE, run_graphs

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
    for run, (shape, *_), result in zip(runs, cases, zip(*by_rank, strict=True), strict=True):
        check_course(result, reference(layout(shape, tp=1), STEPS), run)


def record(
    folder: Path, layers: str, *, sp: bool, mutant: str = "", params: str = "fp32", remat: str = "none"
) -> list[list[Recorded]]:
    """The graphs of two steps of ranks of 4096: tp 8, dp 512, 4 copies of the K/V heads, two micro-batches."""
    resolved = layout("gqa2", tp=8, dp=512, sp=sp, micro=1, params=params, remat=remat)
    resolved = changed(resolved, train={"global_batch": 1024})
    job = (recorded, resolved, weights_of(resolved), 4096, RANKS, mutant, layers)
    (result,) = run_devices(1, *job, folder=folder)
    return result  # type: ignore[no-any-return]


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
    assert (report["problems"], report["host_reads"]) == ([], [])
    return {graph["name"]: graph["hash"] for graph in report["graphs"] if graph["name"].startswith("steady")}


def test_graphs_are_traced_as_the_ranks_of_a_run_record_them(tmp_path: Path) -> None:
    published = layout("gqa2", tp=8, dp=512, sp=True, micro=1, params="bf16", update="bf16_stochastic", remat="full")
    plans = [
        changed(published, train={"global_batch": 1024}),
        layout("tied", tp=8, dp=512, micro=1, batch=512),
    ]
    (runs,) = run_devices(1, nxd_xla.hashes_of_steps, plans, 4096, RANKS, 2, folder=tmp_path)
    (reports,) = run_devices(1, nxd_xla.traced, plans, 4096, RANKS, "trn1.32xlarge", folder=tmp_path)
    for by_rank, report in zip(runs, reports, strict=True):
        result = steady(report)
        micro = [result["steady micro-batch"]] * 2 if "steady micro-batch" in result else []
        step = [*micro, *(result[name] for name in result if name != "steady micro-batch")]
        assert by_rank == [step * 2] * len(RANKS)


def test_the_order_of_ranks_is_that_of_the_instance_of_the_run(tmp_path: Path) -> None:
    (result,) = run_devices(1, nxd_xla.orders, [("trn2.48xlarge", 128, 32), ("trn1.32xlarge", 64, 32)], folder=tmp_path)
    # Opposite rows of chips of a trn2 together, with two physical cores per rank.
    assert result[0] == tuple(16 * row + core for row in (0, 3, 1, 2, 4, 7, 5, 6) for core in range(16))
    assert result[1] == tuple(range(64))


def test_the_command_traces_its_layers_and_its_order_of_ranks(tmp_path: Path) -> None:
    """NxD joins every eighth rank of a trn1.32xlarge at tp 4, whichever ranks the process that traces is one of."""
    folders = (ROOT / "tests/support/nxd_site", ROOT, os.environ.get("PYTHONPATH", ""))
    said = run_graphs(
        64,
        [0, 8, 41],
        "--json",
        "--steps=2",
        f"--hlo={tmp_path}",
        *SHAPE,
        "parallel.tp=4",
        "parallel.dp=16",
        "backend.layers=auto",
        "backend.name=auto",
        PYTHONPATH=os.pathsep.join(map(str, folders)),
        NXD_CPU_MODE="1",  # does not reach the process that traces
    )
    report = json.loads(said)
    assert steady(report)
    assert (report["layers"], report["replaced"]) == ("nxd", {"backend.name": "auto"})
    assert "traced with the layers and the order of ranks of neuronx-distributed 0.18.0" in report["notes"]
    micro = next(graph for graph in report["graphs"] if graph["name"] == "steady micro-batch")
    assert {(row["axis"], row["num_groups"], row["group_size"]) for row in micro["collectives"]} == {("tp", 16, 4)}
    text = Path(micro["hlo"]).read_text(encoding="utf-8")
    assert "replica_groups={{0,8,16,24},{1,9,17,25}," in text
    assert "{39,47,55,63}}" in text
    assert "replica_groups={{0,1,2,3}," not in text


@pytest.mark.parametrize(("pair", "taken"), [([0, 1], 1.0), ([1, 0], 0.0)])
def test_nxd_4_17_a_pair_that_is_named_downwards_receives_its_own_zeros(
    pair: list[int], taken: float, tmp_path: Path
) -> None:
    """XLA gathers in the order in which a group is named; NxD's pipeline looks in the order of the ranks.

    It names pairs downwards where the last rank sends to the first, as the interleaved schedule does, and on a trn2
    whose tensor parallelism takes half a node. Whether Neuron's own collectives keep XLA's order is not known here.
    """
    for gathered, result in run_devices(2, nxd_xla.received, pair, folder=tmp_path):
        assert gathered == [float(rank) for rank in pair]
        assert result == [taken]
