"""Saving: every rank stages its shards on the host and writes them to a draft folder; one rank commits by rename."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed.checkpoint as dcp

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.dcp_planner import ChunkSavePlanner
from nxtrain.checkpoint.dcp_storage import FileWriter, Staged, Staging
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.shards import Shards
from nxtrain.distributed.agreement import Disk, Group, by_leader, collective, is_distributed, shared_disk, together
from nxtrain.errors import CheckpointError
from nxtrain.io.atomic import write_durably
from nxtrain.io.checksummed_file import FileDigest, verify
from nxtrain.io.regular import read_bytes
from nxtrain.mesh import Mesh
from nxtrain.sharding import Layout


@dataclass(frozen=True)
class Retention:
    """Checkpoints that stay.

    Args:
        keep: Number of the newest that stay; 0: all.
        keep_every: Steps that are multiples of this number stay; 0: no step stays for this reason.
    """

    keep: int = 0
    keep_every: int = 0


KEEP_ALL = Retention()


def save(
    path: Path,
    shards: Shards,
    layout: Layout,
    meta: Meta,
    *,
    tokenizer: Path | None = None,
    retention: Retention = KEEP_ALL,
    process_group: Group = None,
) -> None:
    """Write a checkpoint, atomically. Every rank of the world calls this.

    Args:
        path: Folder of the checkpoint, `directory.step_path(...)`; an existing checkpoint is replaced.
        shards: Kind to parameter name to local tensor, on any device.
        layout: Entries of the model's tensors that this rank holds.
        meta: The rest of the state; `mesh`, `kinds` and the checksum are filled in.
        tokenizer: A `tokenizer.json` to save with the checkpoint.
        retention: Checkpoints of the folder that stay.
        process_group: Group of all ranks that can carry host objects; None for the default group.

    Raises:
        CheckpointError: Any rank failed to write; older checkpoints are untouched.
    """
    staged = Staging(layout).fill(shards)
    write_state(path, staged, layout.mesh, meta, tuple(shards), tokenizer, process_group)
    tidy(path, retention, layout.mesh, process_group)


def write_state(
    path: Path,
    staged: Staged,
    mesh: Mesh,
    meta: Meta,
    kinds: tuple[str, ...],
    tokenizer: Path | None,
    group: Group,
    disk: Disk | None = None,
) -> Mapping[str, FileDigest]:
    """Write the staged shards of every rank, and read them back.

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
    """Mark a checkpoint as read back, delete old ones, and record it as the newest. Every rank calls this.

    Args:
        path: Folder of the checkpoint.
        retention: Checkpoints of the folder that stay.
        mesh: The axes of this rank.
        group: Group of all ranks that can carry host objects.
        disk: The ranks that act in the folder; None: rank 0 for all.
        underway: Steps that stay in any case: an upload still reads them.

    Returns:
        Failures, none of which loses the checkpoint.
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
) -> Mapping[str, FileDigest]:
    """Write the shards of a planner to a draft folder, then commit it.

    Args:
        path: Final folder.
        planner: Shards of this rank; without `staged`, one of them at a time is in memory.
        meta: Content of `meta.json`.
        mesh: The axes of this rank.
        tokenizer: A `tokenizer.json` to save with the checkpoint.
        process_group: Group of all ranks that can carry host objects.
        disk: The ranks that act in the folder; None: rank 0 for all.
        staged: Host memory of the planner's tensors, which does not change during the write; None: they are copied.
        check: Called before the commit; an error that it raises prevents the commit.

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
    """Content of the files that complete a checkpoint after the ranks' files, by name, in the order of writing."""
    assert writer.manifest is not None
    manifest = writer.manifest.model_dump_json().encode()
    sealed = meta.model_copy(update={"manifest_crc32": zlib.crc32(manifest)}).sealed()
    kept = {directory.TOKENIZER: read_bytes(tokenizer)} if tokenizer else {}
    return {**kept, directory.MANIFEST: manifest, directory.META: sealed.encode()}


def _commit(draft: Path, path: Path, seal: Mapping[str, bytes]) -> None:
    """Add the files that complete a checkpoint, and rename the draft to its final name."""
    for name, content in seal.items():
        write_durably(draft / name, partial(Path.write_bytes, data=content))
    directory.publish(draft, path)


def read_back(
    path: Path, written: Mapping[str, FileDigest], mesh: Mesh, group: Group, disk: Disk | None = None
) -> None:
    """Read back on every rank the files that it wrote; if any differs, the checkpoint is quarantined.

    Raises:
        CheckpointError: A file differs or cannot be read.
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
