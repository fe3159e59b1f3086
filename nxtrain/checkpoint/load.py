"""Loading: each rank reads the entries of its layout, whatever layout wrote the checkpoint."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from nxtrain.checkpoint.dcp_planner import ChunkLoadPlanner
from nxtrain.checkpoint.dcp_storage import FileReader
from nxtrain.checkpoint.directory import MANIFEST
from nxtrain.checkpoint.manifest import DTYPES, CheckpointManifest, read_manifest
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.checkpoint.shards import MODEL, Shards, TensorShard, tensor_shards
from nxtrain.common.distributed.agreement import Ranks, collective
from nxtrain.common.errors import DamagedError
from nxtrain.common.io.object_store import Location, content_of
from nxtrain.common.sharding import Layout


def open_checkpoint(path: Location) -> tuple[Meta, CheckpointManifest]:
    """Read a checkpoint's metadata and manifest."""
    meta = read_meta(path)
    manifest = read_manifest(path)
    if zlib.crc32(content_of(path / MANIFEST)) != meta.manifest_crc32:
        raise DamagedError(path / MANIFEST, "its content is not what was written")
    return meta, manifest


def whole_weights(manifest: CheckpointManifest) -> list[TensorShard]:
    """Weights of a checkpoint, each as one shard."""
    weights = []
    for key, stored in manifest.tensors.items():
        kind, _, name = key.partition("/")
        if kind == MODEL:
            weights.append(TensorShard.whole(name, stored.shape, DTYPES[stored.dtype]))
    return weights


def read_shards(path: Location, manifest: CheckpointManifest, targets: Mapping[TensorShard, Tensor]) -> None:
    """Fill host tensors from a checkpoint, on this rank alone."""
    with collective(f"cannot read {path}"):
        reader = FileReader(path, manifest, targets)
        dcp.load({}, storage_reader=reader, planner=ChunkLoadPlanner(targets), no_dist=True)


def load(
    path: Location,
    shards: Shards,
    layout: Layout,
    *,
    ranks: Ranks | None = None,
    fallbacks: Sequence[Location] = (),
    on_damage: Callable[[DamagedError], None] = lambda damaged: None,
) -> Meta:
    """Fill local tensors from a checkpoint, padding with zeros. Every rank calls this.

    Host tensors are filled in place, other tensors by way of the host. All bytes that are read are verified.

    Args:
        shards: Kind to parameter name to local tensor, on any device. Other kinds are not read.
        ranks: All ranks of the run; None: those of the layout, over the default group.
        fallbacks: Other locations of the same checkpoint, for blocks that are missing or damaged in `path`.
        on_damage: Called with each damage in `path` that a fallback could replace.
    """
    action, ranks = f"cannot load {path}", ranks or Ranks(layout.mesh)
    meta, manifest = ranks.on_leader(lambda: open_checkpoint(path), action)
    buffers: dict[tuple[str, str], Tensor] = {}
    for kind, tensors in shards.items():
        for name, local in tensors.items():
            if local.is_cpu:
                buffers[kind, name] = local.detach()
            else:
                buffers[kind, name] = torch.empty(local.shape, dtype=local.dtype)
    targets: dict[TensorShard, Tensor] = {
        chunk: chunk.of(buffers[chunk.kind, chunk.parameter]) for chunk in tensor_shards(shards, layout)
    }
    filled = Counter[tuple[str, str]]()
    for chunk, target in targets.items():
        filled[chunk.kind, chunk.parameter] += target.numel()
    padded = [buffer for name, buffer in buffers.items() if filled[name] < buffer.numel()]
    planner = ChunkLoadPlanner(targets, complete=tuple(shards), padded=padded)
    reader = FileReader(path, manifest, targets, fallbacks)
    with collective(action):
        dcp.load(
            {},
            storage_reader=reader,
            planner=planner,
            process_group=ranks.group,
            no_dist=not ranks.are_connected,
        )
    for damaged in reader.damage:
        on_damage(damaged)
    with torch.no_grad():
        for kind, tensors in shards.items():
            for name, local in tensors.items():
                if not local.is_cpu:
                    local.copy_(buffers[kind, name])
    return meta
