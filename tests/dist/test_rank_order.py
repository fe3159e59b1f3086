"""Ranks in an order of the machine's own train as those in ascending order, and go on from each other's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend, Binding
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.train.build import mesh_of
from tests.support.drawn import one_in
from tests.support.models import weights_of
from tests.support.parity import Course, check_course, layout, reference, run_ours
from tests.support.ranks import RankPool
from tests.support.runs import course, run_plan, token_file, train_rank

ORDER = (0, 2, 1, 3)
STEPS = 3


class Strided(Binding):
    """A machine on which every other rank is near."""

    def rank_order(self, *, tp: int, pp: int) -> tuple[int, ...]:
        return ORDER


def run_strided(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> tuple[Mesh, Course]:
    backend.binding = Strided()
    return mesh_of(resolved, backend), run_ours(backend, resolved, STEPS, weights)


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ("gqa2", {"tp": 2, "dp": 2, "sp": True}),
        ("mqa", {"tp": 2, "dp": 2}),  # each K/V head on two ranks
        ("gqa2", {"tp": 2, "dp": 2, "sp": True, "shard": "zero1"}),
        ("gqa2", {"tp": 2, "dp": 2, "shard": "full"}),
        ("gqa2", {"tp": 1, "dp": 4, "shard": "hybrid", "shard_size": 2}),
    ],
    ids=str,
)
def test_they_train_as_transformers_does(ranks: RankPool, shape: str, how: dict[str, Any]) -> None:
    resolved = layout(shape, **how, micro=4 // how["dp"])
    result = ranks.run(4, run_strided, resolved, weights_of(resolved))
    for rank, (mesh, _) in enumerate(result):
        axis = mesh.tp if mesh.tp_size > 1 else mesh.shard
        assert axis.groups == ((0, 2), (1, 3))
        assert (axis.rank, mesh.rank) == (rank // 2, rank)
    check_course([result[rank][1] for rank in ORDER], reference(resolved, STEPS), resolved)


def gathered(backend: CpuBackend) -> list[str]:
    """Errors of the collectives whose result has the order of their ranks; all-reduce has none."""
    backend.choose_transport("gloo")
    axis = Mesh.build(4, backend.rank, tp=2, order=(0, 1, 3, 2)).tp
    said = []
    for collective in (backend.collectives.all_gather, backend.collectives.reduce_scatter):
        try:
            collective(torch.zeros(2), axis)
        except AssertionError as error:
            said.append(str(error))
    assert backend.collectives.all_reduce(torch.ones(1), axis).item() == 2
    return said


def test_a_process_group_that_would_count_ranks_in_another_order_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(4, gathered):
        assert len(said) == 2


def train_strided(backend: Backend, resolved: Resolved) -> None:
    backend.binding = Strided()
    train_rank(backend, resolved)


def without_norms(run_dir: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """The records of a run, and the norms apart."""
    lines = course(run_dir)
    return lines, [line.pop(name) for line in lines for name in ("grad_norm", "param_norm")]


@pytest.mark.parametrize("shard", one_in(3, ["full", "none", "zero1"]))
def test_a_run_goes_on_in_another_order_bit_for_bit(ranks: RankPool, tmp_path: Path, shard: str) -> None:
    """In groups of two, sums do not depend on who is first; norms are sums over four, and clip nothing."""
    data = {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", 16)), "shuffle": True}
    parallel = {"tp": 2, "dp": 2, "sequence_parallel": True, "shard": shard}

    def part(folder: str, steps: int) -> Resolved:
        return run_plan(
            tmp_path / folder,
            data,
            steps=steps,
            parallel=parallel,
            optim={"decay_steps": 4, "clip": 0.0},
            checkpoint={"every": 2, "resume": "auto"},
        )

    ranks.run(4, train_rank, part("plain", 4))
    ranks.run(4, train_strided, part("strided", 2))
    ranks.run(4, train_rank, part("strided", 4))
    ranks.run(4, train_rank, part("back", 2))
    ranks.run(4, train_strided, part("back", 4))
    exact, norms = without_norms(tmp_path / "plain")
    for folder in ("strided", "back"):
        result, others = without_norms(tmp_path / folder)
        assert result == exact
        assert others == pytest.approx(norms, rel=1e-6)
