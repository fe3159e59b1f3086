"""Known tensors for every parameter, whole and cut to any layout, and a `Meta` to save them with."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxtrain.checkpoint.dcp_storage import Staging
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.save import tidy, write_state
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, row_cut
from tests.support.parity import layout, table_of

Shards = dict[str, dict[str, Tensor]]

KINDS = {"model": torch.bfloat16, "exp_avg": torch.float32}
"""Kinds of tensors in these tests, and their types."""


def whole(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of a key: random, never zero, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.rand(shape, generator=generator).add_(0.5).to(dtype)


def cut(table: ParamTable, mesh: Mesh, kinds: Mapping[str, torch.dtype] = KINDS) -> Shards:
    """Shards that a rank holds of the tensors of `whole`."""

    def shard(kind: str, name: str, dtype: torch.dtype) -> Tensor:
        spec = table[name]
        tensors = {
            s.name: whole(f"{kind}/{spec.global_name(name, s)}", spec.global_shape(s), dtype) for s in spec.segments
        }
        local = spec.shard(tensors, mesh.tp)
        return local.narrow(0, *row_cut(local.shape[0], mesh.shard))

    return {kind: {name: shard(kind, name, dtype) for name in table} for kind, dtype in kinds.items()}


def blank(shards: Shards) -> Shards:
    """Tensors of the same form, filled with something that a load must replace, padding included."""
    return {k: {name: torch.full_like(t, 9.0) for name, t in tensors.items()} for k, tensors in shards.items()}


def same(a: Shards, b: Shards) -> bool:
    """True if two sets of shards are equal bit for bit."""
    return {(k, n) for k in a for n in a[k]} == {(k, n) for k in b for n in b[k]} and all(
        torch.equal(a[kind][name], b[kind][name]) for kind in a for name in a[kind]
    )


def table(shape: str, mesh: Mesh, **changes: Any) -> ParamTable:
    """Sharding of a small model by a mesh; changes are those of `layout`, such as `fused_qkv` and `virtual_pp`."""
    return table_of(layout(shape, tp=mesh.tp_size, pp=mesh.pp_size, dp=mesh.dp_size, **changes), mesh)


def meta(step: int = 10, **changes: Any) -> Meta:
    """The rest of a state."""
    values = {"step": step, "samples": 80, "tokens": 2560, "seed": 1, "family": "llama", "config": {}}
    return Meta(**{**values, "dtype": "bfloat16", **changes})


def save(
    path: Path,
    shards: Mapping[str, Mapping[str, Tensor]],
    layout: Layout,
    meta: Meta,
    *,
    tokenizer: Path | None = None,
    retention: Retention = Retention(),  # noqa: B008
) -> None:
    """Write a checkpoint of tensors to a folder that all ranks see, as a run does; every rank calls this."""
    scope, staged = StorageScope(Ranks(layout.mesh)), Staging(layout).fill(shards)
    write_state(path, staged, meta.model_copy(update={"kinds": tuple(shards)}), scope, tokenizer)
    tidy(path, retention, scope)
