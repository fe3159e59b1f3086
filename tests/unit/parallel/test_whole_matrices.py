"""Assignment of matrices to ranks, and whole matrices from the pieces of all ranks, over drawn shapes and meshes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.common.dimensions import Dimensions, block_specs
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Segment, ShardSpec
from nxtrain.parallel.matrix_rounds import (
    exchanged_bytes,
    matrix_flops,
    num_helpers,
    piece_shape,
    rounds_of,
)
from nxtrain.parallel.whole_matrices import WholeMatrices, assemble, divide
from tests.support.models import random

MESHES = [(1, 1, 1), (1, 3, 3), (2, 1, 1), (4, 2, 2), (2, 3, 3), (3, 4, 2), (1, 4, 2)]
"""tp, dp, and the ranks of dp that share state."""


def drawn_spec(rng: Random, tp: int) -> ShardSpec:
    """A matrix that is fused along either dimension or not, cut over tp or not, and rarely divides."""
    replicas = rng.choice([number for number in range(1, tp + 1) if tp % number == 0])
    number = rng.randint(1, 4)
    segments = [Segment(f"s{index}", rng.randint(1, 13), replicas if index % 2 else 1) for index in range(number)]
    total, other = sum(segment.size for segment in segments), rng.randint(1, 11)
    dim = rng.choice((0, 1, None))
    shape = (other, total) if dim == 1 else (total, other)
    return ShardSpec(shape, dim=dim, segments=tuple(segments))


def wholes(spec: ShardSpec, seed: int) -> dict[str, Tensor]:
    return {s.name: random(*spec.global_shape(s), seed=seed + i) for i, s in enumerate(spec.segments)}


def pieces(spec: ShardSpec, whole: dict[str, Tensor], tp: int, shard: int) -> Tensor:
    """Rows of every rank of shard x tp, cut as the layout cuts them: (shard * tp, rows, columns)."""
    results = []
    for rank in range(shard * tp):
        mesh = Mesh.build(shard * tp, rank, tp=tp, shard=shard)
        local = spec.shard(whole, mesh.tp)
        num_rows, _ = piece_shape(spec, mesh.tp, shard)
        first = mesh.shard.rank * num_rows
        own = local[first : first + num_rows]
        results.append(F.pad(own, (0, 0, 0, num_rows - own.shape[0])))
    return torch.stack(results)


@pytest.mark.parametrize(("tp", "dp", "shard"), MESHES)
def test_pieces_of_all_ranks_make_whole_segments_and_back(tp: int, dp: int, shard: int) -> None:
    rng = Random(f"{tp}/{shard}")
    for seed in range(60):
        spec = drawn_spec(rng, tp)
        whole = wholes(spec, seed)
        held = pieces(spec, whole, tp, shard)
        for rank in range(min(2, dp * tp)):
            mesh = Mesh.build(dp * tp, rank, tp=tp, shard=shard)
            result = assemble(spec, mesh, held)
            assert result.keys() == whole.keys()
            assert all(torch.equal(result[name], segment) for name, segment in whole.items()), spec
            assert all(segment.is_contiguous() for segment in result.values())
            assert torch.equal(divide(spec, mesh, whole), held), spec


def block_matrices(layers: int) -> dict[str, ShardSpec]:
    dimensions = Dimensions(64, 24, layers, 4, 2, 6, 40)
    specs = {name: spec for name, spec in block_specs(dimensions, 1).items() if len(spec.shape) == 2}
    return {f"{layer}.{name}": spec for layer in range(layers) for name, spec in specs.items()}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_every_matrix_has_one_owner_and_loads_differ_by_one_matrix_at_most(size: int, layers: int) -> None:
    matrices = block_matrices(layers)
    rounds = rounds_of(matrices, size)
    assert rounds == rounds_of(matrices, size)
    assert sorted(name for item in rounds for name in item.names) == sorted(matrices)
    assert len(rounds) == sum(-(-layers // size) for _ in range(4))
    loads = Counter(dict.fromkeys(range(size), 0))
    for item in rounds:
        assert len(item.owned) == size
        assert {matrices[name].shape for name in item.names} == {item.spec.shape}
        for rank, name in enumerate(item.owned):
            loads[rank] += matrix_flops(item.spec) if name else 0
    most = max(matrix_flops(spec) for spec in matrices.values())
    assert max(loads.values()) - min(loads.values()) <= most


def test_an_operation_counts_twice_for_each_product_and_each_segment_is_a_matrix() -> None:
    fused = ShardSpec((10, 3), dim=0, segments=(Segment("q", 6), Segment("k", 2), Segment("v", 2)))
    of_q = 2 * (3 * 3 * 6 + 3 * 3 * 3 + 3 * 3 * 6)
    of_k = 2 * (2 * 2 * 3 + 2 * 2 * 2 + 2 * 2 * 3)
    assert matrix_flops(fused, steps=5) == 5 * (of_q + 2 * of_k)


@pytest.mark.parametrize(
    ("replicas", "holders", "blocks", "expected"),
    [(1, 8, 2, 1), (64, 1, 4, 4), (6, 1, 4, 3), (8, 2, 32, 8), (4, 8, 2, 1)],
)
def test_no_more_replicas_share_the_work_than_blocks_give(
    replicas: int, holders: int, blocks: int, expected: int
) -> None:
    assert num_helpers(replicas, holders, blocks) == expected


def test_bytes_of_rounds_by_hand() -> None:
    spec = ShardSpec((10, 4), dim=0, segments=(Segment("", 10),))
    tp = Mesh.build(2, 0, tp=2).tp
    assert piece_shape(spec, tp, 3) == (2, 4)
    rounds = rounds_of({"a": spec, "b": spec}, 12)
    assert exchanged_bytes(rounds, tp, 3, 2) == (2 * 5 * 2 * 4 * 4, 6 * 2 * 4 * 4)


def test_a_rank_alone_computes_every_matrix_itself() -> None:
    rng = Random("alone")
    matrices = {f"m{index}": drawn_spec(rng, 1) for index in range(8)}
    shared = WholeMatrices(matrices, Mesh.build(1, 0), 1, C10dCollectives(1), lambda x: x)
    for item in shared.rounds:
        (name,) = item.names
        rows = random(*item.spec.shape)
        seen: list[Tensor] = []

        def double(x: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(x)
            return x * 2

        assert torch.equal(shared.apply(item, {name: rows}, double)[name], rows * 2)
        expected = rows.split([s.size for s in item.spec.segments], item.spec.dim or 0)
        assert all(torch.equal(x, y) for x, y in zip(seen, expected, strict=True))


@pytest.mark.parametrize("lose", ["replicas", "padding"])
def test_pieces_that_are_put_together_wrongly_are_seen(monkeypatch: pytest.MonkeyPatch, lose: str) -> None:
    """Replicated heads are taken once, and padding at the end of a tensor parallel shard is left out."""
    plain: Callable[..., object] = ShardSpec.views

    def wrong(self: ShardSpec, local: Tensor, axis: object) -> object:
        for piece, view in plain(self, local, axis):  # type: ignore[attr-defined]
            if lose == "replicas":
                yield type(piece)(**{**vars(piece), "copy": 0}), view
            else:
                yield piece, local.narrow(self.dim or 0, piece.local_start, piece.local_length)

    spec = ShardSpec((9, 3), dim=0, segments=(Segment("q", 5), Segment("k", 4, 2)))
    whole = wholes(spec, 0)
    held = pieces(spec, whole, 4, 1)
    monkeypatch.setattr(ShardSpec, "views", wrong)
    result = assemble(spec, Mesh.build(4, 0, tp=4), held)
    assert any(result[name].shape != segment.shape for name, segment in whole.items())
