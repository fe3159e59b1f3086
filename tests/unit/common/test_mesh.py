"""Ranks in an order of the machine's own; what a plain order gives is held by every other test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.common.mesh import Mesh
from nxtrain.train.build import build_mesh
from tests.support.parity import layout

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


@pytest.mark.parametrize("order", [(), (0, 2, 1, 3, 4, 6, 5, 7)])
def test_a_machine_holds_the_stages_of_its_ranks(order: tuple[int, ...]) -> None:
    mesh = Mesh.build(8, 0, tp=2, pp=4, order=order)
    assert [mesh.stages_held(first, 2) for first in (0, 4)] == [
        (0,) if not order else (0, 1),
        (2,) if not order else (2, 3),
    ]
    assert [mesh.stages_held(first, 4) for first in (0, 4)] == [(0, 1), (2, 3)]  # no order goes beyond a machine
    assert mesh.stages_held(0, 8) == ()
    assert Mesh.build(8, 0, tp=4).stages_held(0, 4) == ()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4)])
def test_an_order_has_every_rank_once(order: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="every rank once"):
        Mesh.build(4, 0, tp=2, order=order)


EVEN = range(2, 17, 2)


@pytest.mark.parametrize("size", EVEN)
@pytest.mark.parametrize("permuted", [False, True])
def test_neighbours_on_a_ring_meet_in_one_of_two_perfect_matchings(size: int, permuted: bool) -> None:
    world = 2 * size  # with two ranks to each position
    order = tuple(11 * i % world for i in range(world)) if permuted else ()
    axes = [Mesh(world, rank, pp_size=size, tp_size=2, order=order).pp for rank in range(world)]
    matchings = set()
    for rank, pp in enumerate(axes):
        (ring,) = (group for group in pp.groups if rank in group)
        for peer in {(pp.rank + 1) % size, (pp.rank - 1) % size}:
            pairs, back = pp.pairs(peer), axes[ring[peer]].pairs(pp.rank)
            assert (pairs.name, pairs.groups) == (back.name, back.groups), "one program for both ends"
            assert sorted(rank for pair in pairs.groups for rank in pair) == list(range(world))
            (pair,) = (pair for pair in pairs.groups if rank in pair)
            assert pair[pairs.rank] == rank and pair[1 - pairs.rank] == ring[peer]
            assert pairs.rank == (pp.rank > peer), "all ranks of a stage at one place"
            assert pairs.spans_stages
            matchings.add(pairs.groups)
    assert len(matchings) == (1 if size == 2 else 2)


@pytest.mark.parametrize(
    ("size", "peer", "reason"), [(3, 1, "odd ring"), (4, 2, "not neighbours"), (4, 0, "not neigh")]
)
def test_who_is_no_neighbour_on_an_even_ring_is_in_no_pair(size: int, peer: int, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        Mesh(size, 0, pp_size=size).pp.pairs(peer)


def test_axes_know_whether_their_ranks_run_different_programs() -> None:
    mesh = Mesh(8, 0, pp_size=2, dp_size=2, tp_size=2, shard_size=2)
    assert all(axis.spans_stages for axis in (mesh.pp, mesh.model, mesh.state, mesh.all))
    assert not any(axis.spans_stages for axis in (mesh.tp, mesh.dp, mesh.shard, mesh.stage, mesh.tp.neighbours(2)))
    alone = Mesh(8, 0, dp_size=4, tp_size=2)
    assert not any(axis.spans_stages for axis in (alone.pp, alone.model, alone.state, alone.all))


@given(st.data())
def test_context_parallel_ranks_lie_between_data_and_tensor_parallel_ones(data: st.DataObject) -> None:
    """The order is [pp, dp, cp, tp], as NeuronX Distributed's; shard and replica divide dp x cp."""
    pp, dp, cp, tp = (data.draw(st.integers(1, 3)) for _ in range(4))
    world = pp * dp * cp * tp
    shard = data.draw(st.sampled_from([size for size in range(1, dp * cp + 1) if dp * cp % size == 0]))
    order = tuple(data.draw(st.permutations(range(world))))
    grid = torch.tensor(order).view(pp, dp, cp, tp)
    copies = grid.view(pp, (dp * cp) // shard, shard, tp)
    wanted = {
        "pp": grid.permute(1, 2, 3, 0).reshape(-1, pp),
        "dp": grid.permute(0, 2, 3, 1).reshape(-1, dp),
        "cp": grid.permute(0, 1, 3, 2).reshape(-1, cp),
        "tp": grid.reshape(-1, tp),
        "dp_cp": grid.permute(0, 3, 1, 2).reshape(-1, dp * cp),
        "shard": copies.permute(0, 1, 3, 2).reshape(-1, shard),
        "replica": copies.permute(0, 2, 3, 1).reshape(-1, (dp * cp) // shard),
        "batch": grid.permute(3, 0, 1, 2).reshape(-1, pp * dp * cp),
        "model": grid.permute(1, 2, 0, 3).reshape(-1, pp * tp),
    }
    rank = data.draw(st.integers(0, world - 1))
    mesh = Mesh(world, rank, pp, dp, tp, shard, cp, order)
    for name, groups in wanted.items():
        axis = getattr(mesh, name)
        assert {tuple(group) for group in groups.tolist()} == set(axis.groups), name
        assert axis.group_of(rank)[axis.rank] == rank, name


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "ranks_per_node", "size"),
    [
        (1, 1, 8, 4, 4),
        (2, 1, 8, 8, 4),
        (1, 2, 8, 8, 8),  # each stage fills a node
        (4, 4, 2, 8, 2),  # so it does here, where a node has fewer ranks than tp x pp
        (1, 2, 4, 8, 4),  # both stages on one
        (1, 2, 6, 8, 2),  # four would not divide six, and six would begin within one node and end in the next
        (8, 2, 2, 8, 1),  # each copy of a stage fills a node
        (3, 1, 8, 8, 1),  # tensor parallel ranks on two nodes
    ],
)
def test_hybrid_cuts_over_as_many_ranks_of_a_stage_as_a_node_holds(
    tp: int, pp: int, dp: int, ranks_per_node: int, size: int
) -> None:
    resolved = layout("gqa", tp=tp, pp=pp, dp=dp, shard="hybrid")
    mesh = build_mesh(resolved, tp * pp * dp, 0, ranks_per_node)
    assert mesh.shard_size == size
    for group in mesh.shard.groups if size > 1 else ():
        assert len({rank // ranks_per_node for rank in group}) == 1
