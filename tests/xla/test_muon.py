"""Muon on XLA devices: the steps of torch's optimizers, one graph for all steps, and one for all ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.collectives import Collectives
from nxtrain.config.check import Resolved
from nxtrain.config.rule_schedules import BetaPiece
from nxtrain.parallel.whole_matrices import WholeMatrices
from nxtrain.tools.trace.hlo import parse
from tests.support.models import changed, weights_of
from tests.support.parity import OPTIM, check_course, layout, reference
from tests.support.xla_bodies import Recorded, all_steps, courses, recorded
from tests.support.xla_engine import run_devices

STEPS = 2
RATES = [0.0, 1e-3, 1.0, OPTIM["weight_decay"]]
"""Values that XLA would fold into constants, or unite with others, if they came as numbers."""


def run_of(shape: str = "gqa2", **cuts: Any) -> Resolved:
    pieces = [BetaPiece(steps=2, to=0.95)]
    optim = {"name": "muon", "adam_lr": 1e-3, "lr": 1e-3, "ema_decay": 0.9, "weight_decay_schedule": "decoupled"}
    optim |= {"weight_decay": 1e-3, "muon_momentum": 0.6, "muon_momentum_pieces": pieces, "beta1_pieces": pieces}
    return changed(layout(shape, **cuts), optim=optim)


def check_devices(cases: list[Resolved], folder: Path) -> None:
    jobs = [(case, weights_of(case)) for case in cases]
    by_rank = run_devices(2, courses, jobs, STEPS, folder=folder)
    for case, result in zip(cases, zip(*by_rank, strict=True), strict=True):
        check_course([course for course, _ in result], reference(case, STEPS), case)
        assert {graphs for _, graphs in result} == {1}, "one for all steps of all ranks"


def test_two_devices_take_the_steps_of_torchs_optimizers(tmp_path: Path) -> None:
    """Replicas share the work; tensor parallel ranks exchange columns and rows."""
    check_devices([run_of(tp=1, dp=2, micro=2), run_of("odd", tp=2, sp=True)], tmp_path)


@pytest.mark.slow
def test_two_devices_of_zero1_take_the_steps_of_torchs_optimizers(tmp_path: Path) -> None:
    check_devices([run_of("odd", tp=1, dp=2, micro=2, shard="zero1")], tmp_path)


def test_every_step_is_the_same_graph_and_reads_nothing(tmp_path: Path) -> None:
    sound = run_of(tp=1)
    rounded = changed(
        run_of(tp=1, params="bf16", update="bf16_stochastic"),
        precision={"state": "bf16"},
        optim={"muon_precision": "bf16"},
    )
    cases = [(sound, weights_of(sound), RATES, ""), (rounded, weights_of(rounded), RATES, "")]
    (result,) = run_devices(1, all_steps, cases, folder=tmp_path)
    for steps in result:
        assert steps.refusal == ""
        assert steps.compiled == [1] * len(RATES)
        assert steps.fallbacks == ()


def exchanges(text: str) -> Counter[tuple[str, int]]:
    """Count of the collectives that the optimizer alone has, by ranks of a group."""
    result = parse(text).collectives
    return Counter((item.op, len(item.groups[0])) for item in result if item.op in ("all-to-all", "all-gather"))


@pytest.mark.parametrize(
    ("cuts", "ranks", "expected"),
    [
        ({"tp": 2, "dp": 8, "shard": "zero1"}, [0, 1, 6, 15], {("all-to-all", 16): 8, ("all-gather", 8): 1}),
        ({"tp": 1, "dp": 16}, [0, 1, 14, 15], {("all-gather", 2): 4}),
    ],
    ids=["holders", "replicas"],
)
def test_all_ranks_record_the_same_graph(
    tmp_path: Path, cuts: dict[str, Any], ranks: list[int], expected: dict[tuple[str, int], int]
) -> None:
    """Two blocks have four shapes, each with an exchange there and back, or a gather of two replicas' results."""
    resolved = changed(run_of(micro=1, **cuts), train={"global_batch": cuts["dp"]})
    (by_rank,) = run_devices(1, recorded, resolved, weights_of(resolved), 16, ranks, "", folder=tmp_path)
    (first, *_) = by_rank
    for graphs in by_rank:
        assert [graph.hash for graph in graphs] == [first[0].hash] * 2
    assert exchanges(first[0].text) == expected


class _Eager:
    """Collectives that claim to run at once."""

    lazy = False

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def recorded_by_owners(backend: Backend, resolved: Resolved, *args: Any) -> list[list[Recorded]]:
    """Mutant: only ranks that own a matrix of a round record the work on one."""
    plain = WholeMatrices.__init__

    def init(self: WholeMatrices, matrices: Any, mesh: Any, num_blocks: int, comm: Collectives, put: Any) -> None:
        plain(self, matrices, mesh, num_blocks, cast(Collectives, _Eager(comm)), put)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeMatrices, "__init__", init)
        return recorded(backend, resolved, *args)


def test_a_graph_of_the_owners_of_matrices_alone_would_be_noticed(tmp_path: Path) -> None:
    resolved = changed(run_of(micro=1, tp=2, dp=8, shard="zero1"), train={"global_batch": 8})
    args = (resolved, weights_of(resolved), 16, [0, 15], "")
    (((owner, *_), (idle, *_)),) = run_devices(1, recorded_by_owners, *args, folder=tmp_path)
    assert owner.hash != idle.hash
