"""Axes of experts over every small world: each expert's state is held once by the ranks that hold one copy of all."""

from __future__ import annotations

from collections import Counter

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.common.mesh import Axis, Mesh, divisors

WORLDS = [
    (tp, pp, dp, cp)
    for tp in (1, 2, 3)
    for pp in (1, 2)
    for dp in range(1, 9)
    for cp in (1, 2, 3)
    if tp * pp * dp * cp <= 16
]


def meshes(tp: int, pp: int, dp: int, cp: int, ep: int, shard: int) -> list[Mesh]:
    """Mesh of every rank, in an order that is not ascending."""
    world = tp * pp * dp * cp
    order = tuple(reversed(range(world)))
    return [Mesh.build(world, rank, tp=tp, pp=pp, cp=cp, ep=ep, shard=shard, order=order) for rank in range(world)]


def divisions(dp: int, cp: int) -> list[tuple[int, int]]:
    """Every ep above 1 with every number of ranks that share state."""
    copies = dp * cp
    return [(ep, shard) for ep in divisors(copies)[1:] for shard in divisors(copies) if shard == 1 or shard % ep == 0]


def check_ranks(axis: Axis, rank: int) -> tuple[int, ...]:
    """Group of a rank on an axis whose groups hold each rank of the world once."""
    held = Counter(member for group in axis.groups for member in group)
    assert set(held.values()) == {1}
    group = axis.group_of(rank)
    assert group[axis.rank] == rank
    return group


@pytest.mark.parametrize("degrees", WORLDS, ids=str)
def test_axes_of_experts_divide_the_ranks_of_dp_and_cp(degrees: tuple[int, int, int, int]) -> None:
    tp, pp, *of_copies = degrees
    for ep, shard in divisions(*of_copies):
        of_ranks = meshes(*degrees, ep, shard)
        for mesh in of_ranks:
            every = check_ranks(mesh.dp_cp, mesh.rank)
            index = every.index(mesh.rank)
            assert check_ranks(mesh.ep, mesh.rank) == every[index // ep * ep :][:ep], "neighbours have other experts"
            copies = check_ranks(mesh.experts.copies, mesh.rank)
            assert copies == every[index % ep :: ep], "copies are at the same position"
            shards = check_ranks(mesh.experts.shard, mesh.rank)
            replicas = check_ranks(mesh.experts.replica, mesh.rank)
            assert set(shards) <= set(mesh.shard.group_of(mesh.rank))
            assert {other for rank in replicas for other in of_ranks[rank].experts.shard.group_of(rank)} == set(copies)
            assert len(shards) * len(replicas) == len(copies)
        for group in of_ranks[0].state.groups:
            held = Counter(
                (m.pp.rank, m.ep.rank, m.experts.shard.rank, m.tp.rank) for m in (of_ranks[rank] for rank in group)
            )
            assert set(held.values()) == {1}, "each part of the experts counts once"
            assert len(held) == pp * tp * ep * of_ranks[0].experts.shard.size
            dense = Counter((m.pp.rank, m.shard.rank, m.tp.rank) for m in (of_ranks[rank] for rank in group))
            assert set(dense.values()) == {ep if shard == 1 else 1}
            assert len(dense) == pp * tp * shard


@pytest.mark.parametrize("degrees", WORLDS, ids=str)
def test_without_expert_parallelism_every_axis_is_that_of_a_dense_model(degrees: tuple[int, int, int, int]) -> None:
    for shard in divisors(degrees[2] * degrees[3]):
        for mesh in meshes(*degrees, 1, shard):
            assert mesh.experts == mesh.dense
            assert mesh.ep.size == 1
            assert mesh.state == mesh.over("pp", "shard", "tp")
            assert mesh.model.groups == mesh.over("pp", "tp").groups
            assert mesh.model.name == "ppxtp"


@pytest.mark.parametrize(
    ("degrees", "key", "reason"),
    [
        ({"tp": 2, "ep": 3}, "parallel.ep", "3 does not divide dp=4"),
        ({"tp": 2, "cp": 2, "ep": 3}, "parallel.ep", "3 does not divide dp x cp=4"),
        ({"ep": 4, "shard": 2}, "parallel.shard_size", "ep=4 does not divide the 2 ranks that share state"),
    ],
)
def test_experts_that_ranks_cannot_divide_are_refused(degrees: dict[str, int], key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Mesh.build(8, 0, **degrees)  # type: ignore[arg-type]
    assert [problem.key for problem in caught.value.problems] == [key]
