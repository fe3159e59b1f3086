"""Ranks in an order of the machine's own; what a plain order gives is held by every other test."""

from __future__ import annotations

import pytest

from nxtrain.mesh import Mesh

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Two groups of four, their ranks two apart, as on a node of eight cores that are wired so."""


@pytest.mark.parametrize("rank", range(8))
def test_axes_follow_the_places_of_the_ranks(rank: int) -> None:
    mesh = Mesh.build(8, rank, tp=4, order=ORDER)
    assert mesh.tp.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.dp.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.all.groups == (ORDER,)
    for axis in (mesh.tp, mesh.dp, mesh.pp, mesh.shard, mesh.state, mesh.all):
        (group,) = (group for group in axis.groups if rank in group)
        assert group[axis.rank] == rank
    assert (mesh.tp.rank, mesh.dp.rank) == (rank // 2, rank % 2)


def test_neighbours_are_those_of_the_order() -> None:
    assert Mesh.build(8, 3, tp=4, order=ORDER).tp.neighbours(2).groups == ((0, 2), (4, 6), (1, 3), (5, 7))


@pytest.mark.parametrize("rank", range(8))
def test_the_ascending_order_changes_nothing(rank: int) -> None:
    plain, ordered = Mesh.build(8, rank, tp=2, pp=2), Mesh.build(8, rank, tp=2, pp=2, order=tuple(range(8)))
    for name in ("pp", "dp", "tp", "model", "state", "all"):
        assert getattr(ordered, name) == getattr(plain, name)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4)])
def test_an_order_has_every_rank_once(order: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="every rank once"):
        Mesh.build(4, 0, tp=2, order=order)
