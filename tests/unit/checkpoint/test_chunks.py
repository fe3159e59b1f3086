"""Of every whole tensor each entry is written by exactly one rank, whatever the mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nxtrain.checkpoint.shards import TensorShard, owned, tensor_shards
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, Segment, ShardSpec
from tests.support.run_folders import KINDS, table

SHAPES = ("gqa2", "mqa", "odd", "tied")
LAYOUTS = [(tp, dp, 1) for tp, dp in [(1, 1), (2, 1), (4, 1), (8, 1), (1, 3), (2, 2), (4, 3), (8, 2)]]
LAYOUTS += [(1, 3, 3), (2, 2, 2), (4, 3, 3), (8, 6, 2), (2, 6, 3), (1, 40, 40)]  # the last has ranks without rows


def held(specs: ParamTable, mesh: Mesh) -> list[TensorShard]:
    shards = {
        kind: {name: torch.empty(spec.local_shape(mesh.tp), dtype=dtype) for name, spec in specs.items()}
        for kind, dtype in KINDS.items()
    }
    return list(tensor_shards(shards, Layout(specs, mesh)))


def ends(chunk: TensorShard) -> list[int]:
    return [offset + size for offset, size in zip(chunk.block.offsets, chunk.block.sizes, strict=True)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("tp", "dp", "shard"), LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_entry_is_written_once(shape: str, tp: int, dp: int, shard: int, fused: bool) -> None:
    meshes = [Mesh.build(tp * dp, rank, tp=tp, dp=dp, shard=shard) for rank in range(tp * dp)]
    counts: dict[str, torch.Tensor] = {}
    for mesh in meshes:
        specs = table(shape, mesh, fused_qkv=fused, fused_gate_up=fused)
        for chunk in owned(held(specs, mesh)):
            count = counts.setdefault(chunk.key, torch.zeros(chunk.shape, dtype=torch.int8))
            count[tuple(map(slice, chunk.block.offsets, ends(chunk)))].add_(1)
    wanted = table(shape, Mesh(1, 0), fused_qkv=False, fused_gate_up=False)
    assert counts.keys() == {f"{kind}/{name}" for kind in KINDS for name in wanted}
    assert all(bool((count == 1).all()) for count in counts.values())


def shares(tp: int, dp: int, **sizes: int) -> list[int]:
    """Bytes that each rank of a small or, by `sizes`, of a large model writes."""
    written = []
    for rank in range(tp * dp):
        mesh = Mesh.build(tp * dp, rank, tp=tp, dp=dp)
        specs = table("gqa2", mesh, config=sizes, fused_qkv=True, fused_gate_up=True)
        shards = {
            kind: {
                name: torch.empty(spec.local_shape(mesh.tp), dtype=dtype, device="meta") for name, spec in specs.items()
            }
            for kind, dtype in KINDS.items()
        }
        written.append(sum(chunk.num_bytes for chunk in owned(list(tensor_shards(shards, Layout(specs, mesh))))))
    return written


SEVEN_B = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
"""Two blocks of it; the embedding is 26 times what each of 64 replicas writes."""


@pytest.mark.parametrize(
    ("tp", "dp", "sizes"),
    [(1, 2, {}), (1, 6, {}), (2, 5, {}), (4, 3, {}), (8, 2, {}), (2, 64, {**SEVEN_B, "num_key_value_heads": 32})],
)
def test_copies_share_the_bytes_to_within_a_tenth(tp: int, dp: int, sizes: dict[str, int]) -> None:
    written = shares(tp, dp, **sizes)
    mean = sum(written) / len(written)
    assert [share for share in written if abs(share - mean) > 0.1 * mean] == []


def test_a_tensor_is_cut_only_where_a_stretch_ends() -> None:
    """Each end of a stretch cuts one tensor at most, so a file has few parts, none of them a sliver."""
    dp, cuts, smallest = 6, 0, 1.0
    for rank in range(dp):
        mesh = Mesh.build(dp, rank, tp=1, dp=dp)
        whole = held(table("gqa2", mesh), mesh)
        mine = owned(whole)
        parts = [chunk for chunk in mine if chunk not in whole]
        cuts += len(parts)
        smallest = min([smallest, *(chunk.num_bytes / sum(c.num_bytes for c in mine) for chunk in parts)])
    assert 0 < cuts <= 2 * (dp - 1)
    assert smallest > 0.02


def test_a_tied_parameter_goes_by_the_name_of_the_other_and_is_not_written() -> None:
    spec = ShardSpec((4, 2), dim=0, segments=(Segment("", 4),))
    specs = ParamTable({"lm_head.weight": replace(spec, tied_to="model.embed_tokens.weight")})
    mesh = Mesh(1, 0)
    (chunk,) = tensor_shards({"model": {"lm_head.weight": torch.empty(4, 2)}}, Layout(specs, mesh))
    assert chunk.key == "model/model.embed_tokens.weight"
    assert owned([chunk]) == []
