"""Saving: every rank stages its share on the host, all write it beside the final place, one rank commits."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from nxtrain.checkpoint import layout
from nxtrain.checkpoint.blocks import Stored, verify
from nxtrain.checkpoint.chunks import Chunk, Shards, chunks, owned
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.planner import ChunkSavePlanner
from nxtrain.checkpoint.ranks import Group, by_leader, collective, is_distributed, together
from nxtrain.checkpoint.storage import FileWriter
from nxtrain.errors import CheckpointError
from nxtrain.mesh import Mesh
from nxtrain.sharding import Layout


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Args:
        keep: So many of the newest; 0: all.
        keep_every: Those of steps that are multiples of it; 0: none for that.
    """

    keep: int = 0
    keep_every: int = 0


KEEP_ALL = Retention()


def save(
    path: Path,
    shards: Shards,
    cut: Layout,
    meta: Meta,
    *,
    tokenizer: Path | None = None,
    retention: Retention = KEEP_ALL,
    process_group: Group = None,
) -> None:
    """Write a checkpoint; it is there as a whole or not at all. Every rank of the world calls this.

    Args:
        path: Its folder, `layout.step_path(...)`; a checkpoint that is there already is replaced.
        shards: Kind to parameter name to local tensor, on any device.
        cut: Where they lie in the model.
        meta: The rest of the state; `mesh`, `kinds` and the checksum are filled in.
        tokenizer: A `tokenizer.json` to keep with it.
        retention: Checkpoints of the folder that stay.
        process_group: Group of all ranks that can carry host objects; None for the default group.

    Raises:
        CheckpointError: Any rank failed to write; older checkpoints are untouched.
    """
    staged = Staging(cut).fill(shards)
    write_state(path, staged, cut.mesh, meta, tuple(shards), tokenizer, retention, process_group)


class Staging:
    """Host memory for the chunks that a rank writes, kept from one checkpoint to the next.

    Args:
        cut: Where the rank's tensors lie in the model.
    """

    def __init__(self, cut: Layout) -> None:
        self._cut = cut
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._staged: dict[Chunk, Tensor] = {}

    def fill(self, shards: Shards) -> Mapping[Chunk, Tensor]:
        """Bring the chunks to the host, each local tensor in one transfer.

        Args:
            shards: Kind to parameter name to local tensor, on any device; the same ones in each call.

        Returns:
            What this rank writes; valid until the next call.
        """
        if not self._buffers:
            self._prepare(shards)
        for (kind, parameter), buffer in self._buffers.items():
            buffer.copy_(shards[kind][parameter].detach())
        return self._staged

    def _prepare(self, shards: Shards) -> None:
        mine = owned(tuple(chunks(shards, self._cut)))
        for place, group in groupby(mine, key=lambda chunk: (chunk.kind, chunk.parameter)):
            local = shards[place[0]][place[1]]
            buffer = self._buffers[place] = torch.empty(local.shape, dtype=local.dtype)
            self._staged.update({chunk: chunk.of(buffer) for chunk in group})


def write_state(
    path: Path,
    staged: Mapping[Chunk, Tensor],
    mesh: Mesh,
    meta: Meta,
    kinds: tuple[str, ...],
    tokenizer: Path | None,
    retention: Retention,
    group: Group,
) -> None:
    """Write what every rank has staged, read it back, and only then make room.

    Raises:
        CheckpointError: Any rank failed; older checkpoints are untouched.
    """
    degrees = {"pp": mesh.pp_size, "dp": mesh.dp_size, "tp": mesh.tp_size}
    meta = meta.model_copy(update={"mesh": degrees, "kinds": kinds})
    written = write(path, ChunkSavePlanner(tuple(staged), staged.__getitem__), meta, mesh, tokenizer, group)
    read_back(path, written, mesh, group)

    def make_room() -> None:
        layout.mark_verified(path)
        layout.point_to(path)
        layout.prune(path.parent, retention.keep, retention.keep_every)

    by_leader(make_room, mesh, group, f"cannot delete in {path.parent}")


def write(
    path: Path,
    planner: ChunkSavePlanner,
    meta: Meta,
    mesh: Mesh,
    tokenizer: Path | None = None,
    process_group: Group = None,
) -> Mapping[str, Stored]:
    """Write what a planner holds into a staging folder, then commit it.

    Args:
        path: Final folder.
        planner: The chunks of this rank; one at a time is in memory, if its tensors are not there already.
        meta: Content of `meta.json`.
        mesh: The axes of this rank.
        tokenizer: A `tokenizer.json` to keep with it.
        process_group: Group of all ranks that can carry host objects.

    Returns:
        The files that this rank wrote.
    """
    failure = f"cannot write {path}"
    staged = by_leader(lambda: layout.prepare(path), mesh, process_group, failure)
    writer = FileWriter(staged, mesh.rank)
    try:
        with collective(failure):
            dcp.save(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                no_dist=not is_distributed(mesh),
            )
        by_leader(lambda: _commit(staged, path, writer, meta, tokenizer), mesh, process_group, failure)
    except CheckpointError:
        if mesh.rank == 0:
            layout.discard(staged)
        raise
    return writer.stored


def _commit(staged: Path, path: Path, writer: FileWriter, meta: Meta, tokenizer: Path | None) -> None:
    """Seal the files that all ranks have written, and give them their name."""
    assert writer.manifest is not None
    if tokenizer is not None:
        layout.write_durably(staged / layout.TOKENIZER, lambda file: shutil.copyfile(tokenizer, file))
    manifest = writer.manifest.model_dump_json().encode()
    layout.write_durably(staged / layout.MANIFEST, lambda file: file.write_bytes(manifest))
    sealed = meta.model_copy(update={"manifest_crc32": zlib.crc32(manifest)}).sealed()
    layout.write_durably(staged / layout.META, lambda file: file.write_text(sealed))
    layout.publish(staged, path)


def read_back(path: Path, written: Mapping[str, Stored], mesh: Mesh, group: Group) -> None:
    """Let every rank read from the disk what it wrote; if any of it is something else, the checkpoint is put aside.

    Raises:
        CheckpointError: It was.
    """

    def check() -> None:
        for name, stored in written.items():
            verify(path / name, stored)

    try:
        together(check, mesh, group, f"cannot read back {path}")
    except CheckpointError as error:
        by_leader(lambda: layout.quarantine(path), mesh, group, f"cannot put aside {path}")
        raise CheckpointError(f"{error}; what was written cannot be read back, and is put aside") from error
