"""Loading of checkpoints with resharding: each rank reads the entries of its layout, whatever layout wrote them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from nxtrain.checkpoint.directory import MANIFEST
from nxtrain.checkpoint.manifest import DTYPES, CheckpointManifest, read_manifest
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.checkpoint.shard_files import fill_from_files
from nxtrain.checkpoint.shards import MODEL, Shards, TensorShard, mismatches, tensor_shards
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.io.object_store import Location, content_of
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout


def open_checkpoint(path: Location) -> tuple[Meta, CheckpointManifest]:
    """Read a checkpoint's metadata and manifest.

    Raises:
        CheckpointError: The checkpoint is incomplete or of another version.
        DamagedError: The metadata or the manifest is damaged.
    """
    meta = read_meta(path)
    manifest = read_manifest(path)
    if zlib.crc32(content_of(path / MANIFEST)) != meta.manifest_crc32:
        raise DamagedError(path / MANIFEST, "its checksum does not match its content")
    return meta, manifest


def whole_weights(manifest: CheckpointManifest) -> list[TensorShard]:
    """List the weights of a checkpoint, each as one shard with the whole tensor."""
    weights = []
    for key, stored in manifest.tensors.items():
        kind, _, name = key.partition("/")
        if kind == MODEL:
            weights.append(TensorShard.whole(name, stored.shape, DTYPES[stored.dtype]))
    return weights


def read_shards(path: Location, manifest: CheckpointManifest, targets: Mapping[TensorShard, Tensor]) -> None:
    """Fill host tensors from a checkpoint, on one rank without communication."""
    alone, action = Ranks(Mesh(1, 0)), f"cannot read {path}"
    _refuse_misfit(manifest, targets, (), alone, action)
    alone.on_all(lambda: fill_from_files((path,), manifest, targets), action)


def load(
    path: Location,
    shards: Shards,
    layout: Layout,
    *,
    ranks: Ranks | None = None,
    fallbacks: Sequence[Location] = (),
    on_damage: Callable[[DamagedError], None] = lambda damaged: None,
) -> Meta:
    """Fill the local tensors of all ranks from a checkpoint, with zeros as padding. Every rank calls this.

    Host tensors are filled in place, and device tensors through host memory. The checksums of all read bytes are
    verified.

    Args:
        path: Checkpoint.
        shards: Local tensor on any device, by kind and parameter name. Other kinds are not read.
        layout: Sharding of the local tensors.
        ranks: All ranks of the run; None for the ranks of the layout, over the default group.
        fallbacks: Other locations of the same checkpoint, for blocks that are missing or damaged in `path`.
        on_damage: Function called with each damage in `path` that a fallback repaired.

    Returns:
        Metadata of the checkpoint.

    Raises:
        CheckpointError: The tensors do not fit, or cannot be read.
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
    _refuse_misfit(manifest, targets, tuple(shards), ranks, action)
    for buffer in padded:
        buffer.zero_()
    damage: list[DamagedError] = []
    ranks.on_all(lambda: damage.extend(fill_from_files((path, *fallbacks), manifest, targets)), action)
    for damaged in damage:
        on_damage(damaged)
    with torch.no_grad():
        for kind, tensors in shards.items():
            for name, local in tensors.items():
                if not local.is_cpu:
                    local.copy_(buffers[kind, name])
    return meta


def _refuse_misfit(
    manifest: CheckpointManifest,
    targets: Mapping[TensorShard, Tensor],
    complete: Collection[str],
    ranks: Ranks,
    action: str,
) -> None:
    """Raise an error if names, shapes or types of a checkpoint's tensors differ from the wanted tensors of all ranks.

    Args:
        complete: Kinds that must match exactly: a stored tensor of these kinds that no rank wants is an error.
    """
    of_ranks = ranks.gather_on_leader({shard.key: _describe(shard.shape, shard.dtype) for shard in targets})

    def compare() -> None:
        wanted: dict[str, str] = {}
        for of_rank in of_ranks:
            wanted.update(of_rank)
        stored: dict[str, str] = {}
        for key, entry in manifest.tensors.items():
            if key in wanted or key.partition("/")[0] in complete:
                stored[key] = _describe(entry.shape, DTYPES[entry.dtype])
        problems = mismatches(wanted, stored)
        if problems:
            kinds = ", ".join(sorted({key.partition("/")[0] for key in manifest.tensors}))
            lines = [f"{action}: it does not fit the model", *problems, f"it holds: {kinds}"]
            raise CheckpointError("\n".join(lines))

    ranks.on_leader(compare, action)


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Describe a tensor's type and shape for messages, such as `bfloat16 (512, 64)`."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
