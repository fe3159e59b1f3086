"""Saving: every rank stages its share on the host, all write it beside the final place, one rank commits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed.checkpoint as dcp

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.dcp_planner import ChunkSavePlanner
from nxtrain.checkpoint.dcp_storage import FileWriter
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.shards import Shards
from nxtrain.checkpoint.staging import Staged, Staging
from nxtrain.distributed.agreement import Disk, Group, by_leader, collective, is_distributed, shared_disk, together
from nxtrain.errors import CheckpointError
from nxtrain.io.atomic import write_durably
from nxtrain.io.checksummed_file import Stored, verify
from nxtrain.io.regular import read_bytes
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
    write_state(path, staged, cut.mesh, meta, tuple(shards), tokenizer, process_group)
    tidy(path, retention, cut.mesh, process_group)


def write_state(
    path: Path,
    staged: Staged,
    mesh: Mesh,
    meta: Meta,
    kinds: tuple[str, ...],
    tokenizer: Path | None,
    group: Group,
    disk: Disk | None = None,
) -> Mapping[str, Stored]:
    """Write what every rank has staged, and read it back.

    Returns:
        The files that this rank wrote.

    Raises:
        CheckpointError: Any rank failed; older checkpoints are untouched.
    """
    degrees = {"pp": mesh.pp_size, "dp": mesh.dp_size, "tp": mesh.tp_size}
    meta = meta.model_copy(update={"mesh": degrees, "kinds": kinds})
    planner = ChunkSavePlanner(tuple(staged.tensors), staged.tensors.__getitem__)
    written = write(path, planner, meta, mesh, tokenizer, group, disk, staged)
    read_back(path, written, mesh, group, disk)
    return written


def tidy(
    path: Path,
    retention: Retention,
    mesh: Mesh,
    group: Group,
    disk: Disk | None = None,
    underway: Collection[int] = (),
) -> list[str]:
    """Note that a checkpoint was read back, make room, and name it the newest. Every rank calls this.

    Args:
        path: Its folder.
        retention: Checkpoints of the folder that stay.
        mesh: The axes of this rank.
        group: Group of all ranks that can carry host objects.
        disk: Who acts in the folder; None: rank 0 for all.
        underway: Steps that stay in any case, since they are being read.

    Returns:
        What of it failed, which costs no checkpoint.
    """
    folder, disk = path.parent, disk or shared_disk(mesh)
    steps: dict[str, Callable[[], None]] = {
        f"cannot note that {path} was read back": lambda: directory.mark_verified(path),
        f"cannot make room in {folder}": lambda: _prune(folder, retention, underway),
        f"cannot name {path.name} the newest of {folder}": lambda: directory.point_to(path),
    }
    failed = []
    for failure, act in steps.items():
        try:
            disk.on_each(act, mesh, group, failure)
        except CheckpointError as error:
            failed.append(str(error))
    return failed


def _prune(folder: Path, retention: Retention, underway: Collection[int]) -> None:
    for old in directory.doomed(directory.list_checkpoints(folder), retention.keep, retention.keep_every):
        if directory.step_of(old) not in underway:
            directory.discard(old.rename(directory.draft_of(old)))


def write(
    path: Path,
    planner: ChunkSavePlanner,
    meta: Meta,
    mesh: Mesh,
    tokenizer: Path | None = None,
    process_group: Group = None,
    disk: Disk | None = None,
    staged: Staged | None = None,
    check: Callable[[], None] = lambda: None,
) -> Mapping[str, Stored]:
    """Write what a planner holds into a staging folder, then commit it.

    Args:
        path: Final folder.
        planner: The chunks of this rank; one at a time is in memory, if its tensors are not there already.
        meta: Content of `meta.json`.
        mesh: The axes of this rank.
        tokenizer: A `tokenizer.json` to keep with it.
        process_group: Group of all ranks that can carry host objects.
        disk: Who acts in the folder; None: rank 0 for all.
        staged: Where the planner's tensors stay as they are meanwhile; None: they are copied.
        check: Called before the commit; an error of it keeps the checkpoint from being made.

    Returns:
        The files that this rank wrote.
    """
    failure = f"cannot write {path}"
    disk = disk or shared_disk(mesh)
    draft = _prepare(path, disk, mesh, process_group, failure)
    writer = FileWriter(draft, mesh.rank, *((staged.memory, staged.joint) if staged else ()))
    try:
        with collective(failure):
            dcp.save(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                no_dist=not is_distributed(mesh),
            )
        check()
        if staged:
            staged.joint.told = True
        if disk.number == 1:
            by_leader(lambda: _commit(draft, path, _seal(writer, meta, tokenizer)), mesh, process_group, failure)
        else:
            seal = by_leader(lambda: _seal(writer, meta, tokenizer), mesh, process_group, failure)
            disk.on_each(lambda: _commit(draft, path, seal), mesh, process_group, failure)
    except CheckpointError:
        if disk.leads:
            directory.discard(draft)
        raise
    return writer.stored


def _prepare(path: Path, disk: Disk, mesh: Mesh, group: Group, failure: str) -> Path:
    if disk.number == 1:
        return by_leader(lambda: directory.prepare(path), mesh, group, failure)
    draft = path.with_name(by_leader(lambda: directory.draft_of(path).name, mesh, group, failure))
    disk.on_each(lambda: directory.prepare(path, draft), mesh, group, failure)
    return draft


def _seal(writer: FileWriter, meta: Meta, tokenizer: Path | None) -> dict[str, bytes]:
    """What is written when all ranks have written, by name, in this order."""
    assert writer.manifest is not None
    manifest = writer.manifest.model_dump_json().encode()
    sealed = meta.model_copy(update={"manifest_crc32": zlib.crc32(manifest)}).sealed()
    kept = {directory.TOKENIZER: read_bytes(tokenizer)} if tokenizer else {}
    return {**kept, directory.MANIFEST: manifest, directory.META: sealed.encode()}


def _commit(draft: Path, path: Path, seal: Mapping[str, bytes]) -> None:
    """Seal the files that ranks have written, and give them their name."""
    for name, content in seal.items():
        write_durably(draft / name, partial(Path.write_bytes, data=content))
    directory.publish(draft, path)


def read_back(path: Path, written: Mapping[str, Stored], mesh: Mesh, group: Group, disk: Disk | None = None) -> None:
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
        disk = disk or shared_disk(mesh)
        disk.on_each(lambda: directory.quarantine(path), mesh, group, f"cannot put aside {path}")
        raise CheckpointError(f"{error}; what was written cannot be read back, and is put aside") from error
