"""Saving of checkpoints: every rank writes its staged shards to a draft folder, which one rank commits by rename."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.manifest import CheckpointManifest
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.shard_files import join, locate, write_shards
from nxtrain.checkpoint.staging import Staged
from nxtrain.checkpoint.tokenizer_files import tokenizer_files
from nxtrain.common.distributed.agreement import StorageScope
from nxtrain.common.errors import CheckpointError, NxtrainError
from nxtrain.common.io.atomic import write_durably
from nxtrain.common.io.checksummed_file import FileDigest, verify
from nxtrain.common.mesh import Mesh


def write_state(
    path: Path, staged: Staged, meta: Meta, scope: StorageScope, tokenizer: Path | None = None
) -> Mapping[str, FileDigest]:
    """Write the staged shards of all ranks as a checkpoint, and verify the files by reading them back.

    Returns:
        Checksums of the files that this rank wrote, by name.
    """
    meta = meta.model_copy(update={"mesh": degrees_of(scope.ranks.mesh)})
    written = write(path, staged, meta, scope, tokenizer)
    read_back(path, written, scope)
    return written


def degrees_of(mesh: Mesh) -> dict[str, int]:
    """Parallel degrees of a mesh by axis, as `meta.json` has them; their product is the number of ranks."""
    degrees = {"pp": mesh.pp_size, "dp": mesh.dp_size, "tp": mesh.tp_size}
    if mesh.cp_size > 1:
        degrees["cp"] = mesh.cp_size
    return degrees


def tidy(path: Path, retention: Retention, scope: StorageScope, in_use: Collection[int] = ()) -> list[str]:
    """Mark a checkpoint as verified, apply retention, and record the newest checkpoint. Every rank calls this.

    Returns:
        Messages of failures.
    """
    folder = path.parent
    steps: dict[str, Callable[[], None]] = {
        f"cannot mark {path} as verified": lambda: directory.mark_verified(path),
        f"cannot delete old checkpoints in {folder}": lambda: directory.prune(folder, retention, in_use),
        f"cannot record {path.name} as the newest checkpoint of {folder}": lambda: directory.point_to(path),
    }
    failed = []
    for failure, act in steps.items():
        try:
            scope.on_each(act, failure)
        except CheckpointError as error:
            failed.append(str(error))
    return failed


def write(
    path: Path,
    staged: Staged,
    meta: Meta,
    scope: StorageScope,
    tokenizer: Path | None = None,
    check: Callable[[], None] = lambda: None,
) -> Mapping[str, FileDigest]:
    """Write the staged shards of all ranks to a draft folder, call `check`, then commit by rename.

    Returns:
        Checksums of the files that this rank wrote, by name.
    """
    failure, ranks = f"cannot write {path}", scope.ranks
    staged.arrived()
    draft = path.with_name(ranks.on_leader(lambda: directory.draft_of(path).name, failure))
    scope.on_each(lambda: directory.prepare(path, draft), failure)
    mine: dict[str, FileDigest] = {}

    def write_mine() -> dict[str, FileDigest]:
        mine.update(write_shards(draft, ranks.mesh.rank, staged))
        return mine

    try:
        if not staged.joint.is_planned:
            located = ranks.gather_on_leader(locate(staged))
            ranks.on_leader(lambda: staged.joint.tensors.update(join(located)), failure)
        files: dict[str, FileDigest] = {}
        for of_rank in ranks.on_all(write_mine, failure):
            files.update(of_rank)
        check()
        staged.joint.is_planned = True
        # Only the leader of a shared folder needs the manifest, which lists every shard of the run.
        seal = None
        if scope.number > 1:
            seal = ranks.on_leader(lambda: _seal(files, staged, meta, tokenizer), failure)
        scope.on_each(lambda: _commit(draft, path, seal or _seal(files, staged, meta, tokenizer)), failure)
    except NxtrainError:
        if scope.leads:
            directory.discard(draft)
        raise
    return mine


def _seal(files: Mapping[str, FileDigest], staged: Staged, meta: Meta, tokenizer: Path | None) -> dict[str, bytes]:
    """Contents of a checkpoint's tokenizer and its companions, manifest and `meta.json`, by name, in this order."""
    listed = CheckpointManifest(files=dict(sorted(files.items())), tensors=staged.joint.tensors)
    manifest = listed.model_dump_json().encode()
    sealed = meta.model_copy(update={"manifest_crc32": zlib.crc32(manifest)}).sealed()
    content: dict[str, bytes] = {}
    if tokenizer:
        content |= tokenizer_files(tokenizer.parent, tokenizer.name)
    content[directory.MANIFEST] = manifest
    content[directory.META] = sealed.encode()
    return content


def _commit(draft: Path, path: Path, seal: Mapping[str, bytes]) -> None:
    """Write the files that complete a checkpoint to its draft, and commit the draft by rename."""
    for name, content in seal.items():
        write_durably(draft / name, partial(Path.write_bytes, data=content))
    directory.publish(draft, path)


def read_back(path: Path, written: Mapping[str, FileDigest], scope: StorageScope) -> None:
    """Verify a written checkpoint: every rank reads back its files, and any difference quarantines the checkpoint.

    Raises:
        CheckpointError: A file differs or cannot be read.
    """

    def check() -> None:
        for name, stored in written.items():
            verify(path / name, stored)

    try:
        scope.ranks.on_all(check, f"cannot read back {path}")
    except CheckpointError as error:
        scope.on_each(lambda: directory.quarantine(path), f"cannot quarantine {path}")
        raise CheckpointError(
            f"{error}; the written files cannot be verified, and the checkpoint is quarantined"
        ) from error
