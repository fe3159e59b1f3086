"""Saving: every rank stages its share on the host, all write it beside the final place, one rank commits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from nxtrain.checkpoint import layout
from nxtrain.checkpoint.chunks import Chunk, Shards, chunks, owned
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.planner import ChunkSavePlanner, collective
from nxtrain.errors import CheckpointError
from nxtrain.mesh import Mesh
from nxtrain.sharding import Layout


def save(
    path: Path,
    shards: Shards,
    cut: Layout,
    meta: Meta,
    *,
    tokenizer: Path | None = None,
    keep: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint; it is there as a whole or not at all. Every rank of the world calls this.

    Args:
        path: Its folder, `layout.step_path(...)`; a checkpoint that is there already is replaced.
        shards: Kind to parameter name to local tensor, on any device.
        cut: Where they lie in the model.
        meta: The rest of the state; `mesh` and `kinds` are filled in.
        tokenizer: A `tokenizer.json` to keep with it.
        keep: Checkpoints that stay in the folder, this one included; 0 for all.
        process_group: Group of all ranks that can carry host objects; None for the default group.

    Raises:
        CheckpointError: Any rank failed to write; older checkpoints are untouched.
    """
    mesh = cut.mesh
    degrees = {"pp": mesh.pp_size, "dp": mesh.dp_size, "tp": mesh.tp_size}
    meta = meta.model_copy(update={"mesh": degrees, "kinds": tuple(shards)})
    staged = stage(shards, cut)
    write(path, ChunkSavePlanner(tuple(staged), staged.__getitem__), meta, mesh, tokenizer, process_group)
    on_leader(lambda: layout.prune(path.parent, keep), mesh, process_group, f"cannot delete in {path.parent}")


def stage(shards: Shards, cut: Layout) -> Mapping[Chunk, Tensor]:
    """Bring the chunks that this rank writes to the host, each device tensor in one transfer."""
    staged = {}
    mine = owned(tuple(chunks(shards, cut)))
    for (kind, parameter), group in groupby(mine, key=lambda chunk: (chunk.kind, chunk.parameter)):
        local = shards[kind][parameter].detach().cpu()
        staged.update({chunk: chunk.of(local) for chunk in group})
    return staged


def write(
    path: Path,
    planner: ChunkSavePlanner,
    meta: Meta,
    mesh: Mesh,
    tokenizer: Path | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    file_per_tensor: bool = False,
) -> None:
    """Write what a planner holds into a staging folder, then commit it.

    Args:
        path: Final folder.
        planner: The chunks of this rank.
        meta: Content of `meta.json`.
        mesh: The axes of this rank.
        tokenizer: A `tokenizer.json` to keep with it.
        process_group: Group of all ranks that can carry host objects.
        file_per_tensor: Give each tensor a file, since torch keeps all tensors of a file in memory until it is written.
    """

    def commit() -> None:
        folder = layout.staging(path)
        if tokenizer is not None:
            layout.write_durably(folder / layout.TOKENIZER, lambda file: shutil.copyfile(tokenizer, file))
        content = meta.model_dump_json(indent=2)
        layout.write_durably(folder / layout.META, lambda file: file.write_text(content + "\n"))
        layout.publish(path)

    failure = f"cannot write {path}"
    on_leader(lambda: layout.prepare(path), mesh, process_group, failure)
    writer = dcp.FileSystemWriter(layout.staging(path), single_file_per_rank=not file_per_tensor)
    no_dist = not is_distributed(mesh)
    try:
        with collective(failure):
            dcp.save({}, storage_writer=writer, planner=planner, process_group=process_group, no_dist=no_dist)
        on_leader(commit, mesh, process_group, failure)
    except CheckpointError:
        if mesh.rank == 0:
            layout.discard(path)
        raise


def on_leader(action: Callable[[], None], mesh: Mesh, group: dist.ProcessGroup | None, failure: str) -> None:
    """Let rank 0 act on the shared folder while the others wait; if it fails, all fail."""
    reason = [""]
    if mesh.rank == 0:
        try:
            action()
        except OSError as error:
            reason = [str(error)]
    if is_distributed(mesh):
        dist.broadcast_object_list(reason, src=0, group=group)
    if reason[0]:
        raise CheckpointError(f"{failure}: {reason[0]}")


def is_distributed(mesh: Mesh) -> bool:
    """Whether other processes take part."""
    return mesh.world > 1 and dist.is_initialized()
