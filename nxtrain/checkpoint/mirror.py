"""Mirror of a run's checkpoints in a folder or in object storage, which survives the loss of nodes.

A mirrored checkpoint is complete if it has `meta.json`, which is written last and deleted first. Files are verified
during the upload.
"""

from __future__ import annotations

import re
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nxtrain.checkpoint import directory
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import CheckpointError, ConfigError, NxtrainError
from nxtrain.common.hf_files import COMPANIONS
from nxtrain.common.io.checksummed_file import FileDigest
from nxtrain.common.io.object_store import Location, ObjectStore, content_of, location_of, open_store
from nxtrain.common.run_folder import CHECKPOINTS_DIR

_CORRUPT = "meta.corrupt.json"
"""New name of `meta.json` in a quarantined checkpoint of the mirror."""
_ABANDONED = "meta.abandoned.json"
"""New name of `meta.json` in a checkpoint of the mirror that a rewind abandoned."""
_FOLDER = re.compile(r"step-(\d{8,})")
_STEP = re.compile(r"step-(\d{8,})/([^/]+)")


class Mirror:
    """Mirror of checkpoints in an object store: uploads, quarantine, retention and rewinds."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def __str__(self) -> str:
        return str(self.store.root)

    def folder(self, step: int) -> Location:
        """Location of a step's checkpoint in the mirror."""
        return self.store.root / _folder(step)

    def check(self, folder: Path) -> None:
        """Check that files can be written to the mirror and deleted from it, and that it is not the mirrored folder."""
        name = f".nxtrain-{uuid.uuid4().hex[:8]}/check"
        self.store.put(name, b"nxtrain")
        is_same = (folder / name).exists()  # paths may differ by a link or a mount
        self.store.delete([name])
        if is_same:
            raise ConfigError(
                f"{self} and {folder} are the same folder, in which an upload would delete the checkpoint itself; "
                "use another checkpoint.mirror"
            )

    def steps(self) -> list[int]:
        """List the steps of the mirror's complete checkpoints, oldest first."""
        return sorted(step for step, names in self._files().items() if directory.META in names)

    def quarantined(self) -> list[str]:
        """List the locations of the mirror's quarantined checkpoints."""
        return [str(self.folder(step)) for step, names in sorted(self._files().items()) if _CORRUPT in names]

    def unusable(self, after: int) -> list[str]:
        """List the names of incomplete and quarantined checkpoints of the mirror after a step."""
        files = sorted(self._files().items())
        return [_folder(step) for step, names in files if step > after and not names & {directory.META, _ABANDONED}]

    def remnants(self) -> list[str]:
        """List the locations of incomplete checkpoints that show a loss; a single one may be an interrupted upload."""
        marks = {directory.META, _CORRUPT, _ABANDONED}
        incomplete = {step: names for step, names in sorted(self._files().items()) if not names & marks}
        if len(incomplete) == 1 and not any(directory.MANIFEST in names for names in incomplete.values()):
            return []
        return [str(self.folder(step)) for step in incomplete]

    def begin(self, step: int) -> None:
        """Prepare the upload of a checkpoint: delete an older version of the step, and incomplete checkpoints."""
        for other, names in self._files().items():
            if other == step or not names & {directory.META, _CORRUPT, _ABANDONED}:
                self._remove(other, names)

    def add(self, step: int, file: Path, stored: FileDigest) -> None:
        """Upload a rank's file of a checkpoint."""
        self.store.upload(f"{_folder(step)}/{file.name}", file, stored)

    def finish(self, step: int, checkpoint: Path) -> None:
        """Complete the upload of a checkpoint: copy the tokenizer's files, the manifest and `meta.json`, in order."""
        for name in (*COMPANIONS, directory.MANIFEST, directory.META):
            if (checkpoint / name).exists():
                self.store.put(f"{_folder(step)}/{name}", content_of(checkpoint / name))

    def quarantine(self, step: int) -> str:
        """Quarantine a damaged checkpoint of the mirror, so that no run resumes from it; return its location."""
        self._rename(step, directory.META, _CORRUPT)
        return str(self.folder(step))

    def abandon(self, after: int, *, damaged: bool = False) -> list[int]:
        """Mark the mirror's checkpoints after a step as abandoned; see `directory.abandon`."""
        marks = {directory.META}
        if damaged:
            marks.add(_CORRUPT)
        files = {step: names for step, names in sorted(self._files().items()) if step > after}
        for step, names in files.items():
            for name in names & marks:
                self._rename(step, name, _ABANDONED)
        return [step for step, names in files.items() if directory.META in names]

    def prune(self, retention: directory.Retention) -> None:
        """Delete the mirror's checkpoints that the retention rule does not keep; see `directory.steps_to_delete`."""
        files = self._files()
        whole = sorted(step for step, names in files.items() if directory.META in names)
        for step in sorted(directory.steps_to_delete(whole, whole, retention)):
            self._remove(step, files[step])

    def _rename(self, step: int, name: str, new: str) -> None:
        self.store.put(f"{_folder(step)}/{new}", content_of(self.folder(step) / name))
        self.store.delete([f"{_folder(step)}/{name}"])

    def _files(self) -> Mapping[int, set[str]]:
        files: dict[int, set[str]] = defaultdict(set)
        for name in self.store.sizes():
            match = _STEP.fullmatch(name)
            if match:
                files[int(match[1])].add(match[2])
        return files

    def _remove(self, step: int, names: set[str]) -> None:
        # In two requests: if the second fails, the remaining files do not look complete.
        if directory.META in names:
            self.store.delete([f"{_folder(step)}/{directory.META}"])
        self.store.delete([f"{_folder(step)}/{name}" for name in sorted(names - {directory.META})])


def locate_checkpoint(address: str | Path) -> Location:
    """Find a checkpoint by a path or an address: a checkpoint, a mirror or a run folder.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
    location = location_of(str(address))
    if isinstance(location, Path):
        try:
            return directory.find_checkpoint(location)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {location}: {error.strerror}; check the path and its permissions"
            ) from error
    if (location / directory.META).is_file():
        return location
    found = checkpoints_in(location)
    if found:
        return found[-1]
    raise CheckpointError(f"{location} holds no complete checkpoint; give a step, a checkpoint.mirror or a run folder")


def checkpoints_in(location: Location) -> list[Location]:
    """List the complete checkpoints of a run folder, a `checkpoints` folder or a mirror, oldest first."""
    for folder in (location, location / CHECKPOINTS_DIR):
        found: list[Location] = []
        if isinstance(folder, Path):
            found += directory.list_checkpoints(folder)
        else:
            mirror = Mirror(open_store(folder))
            found += [mirror.folder(step) for step in mirror.steps()]
        if found:
            return found
    return []


def choice_of(address: str | Path, checkpoint: Location) -> str:
    """Warning if `locate_checkpoint` skipped newer checkpoints that are incomplete or damaged; else empty."""
    if is_same(location_of(str(address)), checkpoint) or _FOLDER.fullmatch(checkpoint.name) is None:
        return ""
    if isinstance(checkpoint, Path):
        folder = checkpoint.parent
        newer = [name for name in directory.newer_unusable(checkpoint) if not (folder / name / _ABANDONED).exists()]
    else:
        newer = Mirror(open_store(checkpoint.rpartition("/")[0])).unusable(after=directory.step_of(checkpoint))
    if not newer:
        return ""
    return f"WARNING: {checkpoint.name} is not the newest: {', '.join(newer)} is incomplete or damaged"


def step_in(root: Location, checkpoint: Location) -> int | None:
    """Return the step of a checkpoint if it is in the `checkpoints` folder or mirror `root`; else None."""
    match = _FOLDER.fullmatch(checkpoint.name)
    if match is None:
        return None
    if isinstance(checkpoint, Path):
        parent: Location = checkpoint.parent
    else:
        parent = location_of(checkpoint.rpartition("/")[0])
    if is_same(root, parent):
        return int(match[1])
    return None


def is_same(one: Location, other: Location) -> bool:
    """True if two locations are equal after symbolic links are resolved."""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return one == other


TIMEOUT_S = 24 * 3600.0
"""Time limit, in seconds, for waits of ranks while another rank uses a mirror, since a slow mirror is not a hang."""


@dataclass(frozen=True)
class Mirrored:
    """Mirror of a run, and the storage scope of the mirrored folder: shared by nodes, or on separate disks."""

    mirror: Mirror
    scope: StorageScope


def open_mirrored(address: str, folder: Path, ranks: Ranks, local_rank: int) -> Mirrored:
    """Open a mirror on all ranks, and detect the nodes that share the mirrored folder. Every rank calls this."""
    opened: list[Mirror] = []

    def reach() -> None:
        opened.append(Mirror(open_store(address)))
        if local_rank == 0:
            opened[0].check(folder)

    ranks.on_all(reach, f"cannot use checkpoint.mirror={address}")
    return Mirrored(opened[0], _find_scope(folder, ranks, local_rank))


def copy(mirror: Mirror, path: Path, written: Mapping[str, FileDigest], ranks: Ranks) -> str:
    """Upload a checkpoint to the mirror, each rank its own files. Every rank calls this.

    Args:
        mirror: Mirror of the run.
        path: Checkpoint.
        written: Checksums of the files that this rank wrote, by name.
        ranks: All ranks of the run.

    Returns:
        Reason of a failure; empty if the checkpoint is in the mirror.
    """
    step, failure = directory.step_of(path), f"cannot copy {path.name} to {mirror}"

    def add() -> None:
        for name, stored in written.items():
            mirror.add(step, path / name, stored)

    try:
        ranks.on_leader(lambda: mirror.begin(step), failure)
        ranks.on_all(add, failure)
        ranks.on_leader(lambda: mirror.finish(step, path), failure)
    except NxtrainError as error:
        return str(error)
    return ""


def prune(mirror: Mirror, retention: directory.Retention, ranks: Ranks) -> str:
    """Delete the mirror's checkpoints that retention does not keep, and return the reason of a failure, if any.

    Every rank calls this.
    """
    try:
        ranks.on_leader(lambda: mirror.prune(retention), f"cannot delete in {mirror}")
    except NxtrainError as error:
        return str(error)
    return ""


def _find_scope(folder: Path, ranks: Ranks, local_rank: int) -> StorageScope:
    """Detect the nodes that share a folder.

    The first rank of each node creates a file with its rank in the name. A rank's leader is the lowest rank whose file
    it can open. Files are opened by name, since a network file system may serve a listing from a cache.
    """
    failure = f"cannot write in {folder}"
    sign = ranks.on_leader(lambda: f".disk-{uuid.uuid4().hex[:8]}-", failure)
    mine = folder / f"{sign}{ranks.mesh.rank}"

    def make_sign() -> bool:
        if local_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            mine.touch()
        return local_rank == 0

    try:
        nodes = [rank for rank, is_first in enumerate(ranks.on_all(make_sign, failure)) if is_first]
        leaders = ranks.on_all(lambda: next(rank for rank in nodes if _can_open(folder / f"{sign}{rank}")), failure)
    finally:
        if local_rank == 0:
            mine.unlink(missing_ok=True)
    return StorageScope(ranks, leaders[ranks.mesh.rank], len({*leaders}))


def _can_open(path: Path) -> bool:
    try:
        path.open("rb").close()
    except FileNotFoundError:
        return False
    return True


def _folder(step: int) -> str:
    return directory.step_path(Path(), step).name
