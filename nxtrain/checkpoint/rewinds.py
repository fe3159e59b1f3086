"""Record of a run's rewinds, on each disk and in the mirror, so that no start resumes from abandoned checkpoints.

A run rewinds on request: `checkpoint.resume=never` or a path. The record shows a restart that the rewind is done. A
disk or a mirror that was offline during the rewind learns from it which of its checkpoints are abandoned.
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.mirror import Mirrored
from nxtrain.distributed.agreement import Ranks, StorageScope
from nxtrain.errors import CheckpointError, DamagedError
from nxtrain.io.atomic import sync_folder, write_durably
from nxtrain.io.object_store import Location, content_of
from nxtrain.io.read_retry import damage, unsteady
from nxtrain.run_folder import CHECKPOINTS_DIR

FILE = "lineage.json"
_SEAL = "crc32"


class Rewind(BaseModel):
    """One rewind of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    told: str
    """The requested value of `checkpoint.resume`. Empty: a repeated request that has not been carried out."""
    job: str = ""
    """Origin of the request: the scheduler's or the agent's name for the job that it restarts."""
    keeps: int | None = None
    """The last step that stays part of the run; -1: no step stays; None: all steps stay."""


class RunHistory(BaseModel):
    """Identity and rewinds of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str
    """Identity of the run."""
    run_dir: str
    """Absolute path of the run's folder, as configured."""
    returns: tuple[Rewind, ...] = ()
    """Rewinds of the run, oldest first."""

    def has_returned(self, requested: str, job: str) -> bool:
        """True if the last rewind has this request and this job."""
        return bool(self.returns) and (self.returns[-1].told, self.returns[-1].job) == (requested, job)

    def keeps(self, known: int) -> int | None:
        """Last step that stays in a place that has seen the first `known` rewinds only; None: all steps stay."""
        return min((each.keeps for each in self.returns[known:] if each.keeps is not None), default=None)

    def sealed(self) -> bytes:
        """Content of `lineage.json`, with its checksum."""
        return (json.dumps({**self.model_dump(mode="json"), _SEAL: self._checksum()}, indent=2) + "\n").encode()

    def _checksum(self) -> int:
        return zlib.crc32(json.dumps(self.model_dump(mode="json")).encode())


def read(root: Location) -> RunHistory | None:
    """Read the record of a `checkpoints` folder or of a mirror; None: there is none.

    Raises:
        DamagedError: The file's content differs from the written bytes.
    """
    file = root / FILE
    try:
        content = json.loads(unsteady.read(lambda: content_of(file), file))
        seal = content.pop(_SEAL)
        found = RunHistory.model_validate_json(json.dumps(content))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damage(file, error) from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DamagedError(file, "it is no record of a run") from error
    if seal != found._checksum():
        raise DamagedError(file, "its content is not what was written")
    return found


def write(folder: Path, history: RunHistory) -> None:
    """Write the record of a `checkpoints` folder, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{FILE}"
    write_durably(draft, lambda file: file.write_bytes(history.sealed()))
    draft.replace(folder / FILE)
    sync_folder(folder)


class RewindLog:
    """Records of a run on its disks and in its mirror. Every rank makes one log, and makes the same calls.

    Args:
        run_dir: Folder of the run.
        mirrored: Mirror of the run, if it has one.
        ranks: All ranks of the run.
        takes_over: The run resumes from this mirror on request, even if the mirror belongs to another run.

    Attributes:
        newest: The record with the most rewinds of all places.
        damaged: Damage of the records that cannot be read.

    Raises:
        CheckpointError: The mirror, or a disk, belongs to another run.
    """

    def __init__(
        self,
        run_dir: Path,
        mirrored: Mirrored | None,
        ranks: Ranks,
        *,
        takes_over: bool,
    ) -> None:
        self._folder, self._mirrored, self._ranks = run_dir / CHECKPOINTS_DIR, mirrored, ranks
        self._scope = mirrored.scope.over(ranks) if mirrored else StorageScope(ranks)
        self._there: RunHistory | DamagedError | None = None
        if mirrored is not None:
            root = mirrored.mirror.store.root
            self._there = ranks.on_leader(lambda: _read(root), f"cannot read {root / FILE}")
        held = self._scope.on_each(lambda: _read(self._folder), f"cannot read {self._folder / FILE}")
        self._here, disks = held.get(self._scope.leader), [*held.values()]
        self.damaged = [found for found in (self._there, *disks) if isinstance(found, DamagedError)]
        folder, new = ranks.on_leader(lambda: (os.path.abspath(run_dir), uuid.uuid4().hex), "no name for a run")
        fresh = RunHistory(run=new, run_dir=folder)
        known = [found for found in (self._there, *disks) if isinstance(found, RunHistory)]
        self._is_new = self._belongs_to_others([found for found in disks if isinstance(found, RunHistory)], fresh)
        if self._is_new and not takes_over:
            self._refuse(fresh)
        newest = fresh if self._is_new else max(known, key=lambda each: len(each.returns), default=fresh)
        self.newest = newest.model_copy(update={"run_dir": folder})

    def abandon_missed(self, *, on_disks: bool = True, in_mirror: bool = True) -> list[int]:
        """Abandon the checkpoints of rewinds that a disk or the mirror has missed; returns their steps."""
        here = -1 if self._is_new else self._missed(self._here)
        there = self._missed(self._there)
        return self._abandon(here if on_disks else None, there if in_mirror else None, damaged=True)

    def abandon(self, after: int, *, damaged: bool) -> list[int]:
        """Abandon the checkpoints after a step, on all disks and in the mirror; returns their steps.

        Args:
            after: The last step that stays.
            damaged: Abandon quarantined checkpoints too.
        """
        return self._abandon(after, after, damaged=damaged)

    def add(self, rewind: Rewind) -> None:
        """Add a rewind, or the request of one; `write` makes it durable."""
        self.newest = self.newest.model_copy(update={"returns": (*self.newest.returns, rewind)})

    def write(self, known: int = 0) -> None:
        """Update the records: the mirror's first, so that the loss of a disk loses no rewind.

        Args:
            known: Update only records with at least this many rewinds; the others must keep what they have missed.
        """
        newest, mirrored = self.newest, self._mirrored

        def is_due(record: RunHistory | DamagedError | None) -> bool:
            return record != newest and (not known or (isinstance(record, RunHistory) and len(record.returns) >= known))

        def write_here() -> None:
            if is_due(self._here):
                write(self._folder, newest)
                self._here = newest

        if mirrored is not None and is_due(self._there):
            store = mirrored.mirror.store
            failure = f"cannot write {store.root / FILE}"
            self._ranks.on_leader(lambda: store.put(FILE, newest.sealed()), failure)
            self._there = newest
        self._scope.on_each(write_here, f"cannot write {self._folder / FILE}")

    def _missed(self, record: RunHistory | DamagedError | None) -> int | None:
        # An unreadable record alone does not mean that the place has missed a rewind.
        if isinstance(record, DamagedError):
            return None
        return self.newest.keeps(len(record.returns) if record else 0)

    def _abandon(self, here: int | None, there: int | None, *, damaged: bool) -> list[int]:
        failure = f"cannot put aside what is no longer part of the run in {self._folder}"
        abandoned = self._scope.on_each(
            lambda: [] if here is None else directory.abandon(self._folder, here, damaged=damaged), failure
        )
        gone = [*abandoned.values()]
        if self._mirrored is not None and there is not None:
            mirror, last = self._mirrored.mirror, there
            failure = f"cannot put aside what is no longer part of the run in {mirror}"
            gone.append(self._ranks.on_leader(lambda: mirror.abandon(last, damaged=damaged), failure))
        return sorted({step for steps in gone for step in steps})

    def _belongs_to_others(self, disks: list[RunHistory], fresh: RunHistory) -> bool:
        """True if the mirror belongs to another run; disks of different runs end the start."""
        there = self._there if isinstance(self._there, RunHistory) else None
        if there is not None and not disks:  # nodes were replaced, if the mirror's run has the same folder
            return there.run_dir != fresh.run_dir
        if there is not None and there.run not in {each.run for each in disks}:
            return True
        if len({each.run for each in disks}) > 1:
            raise CheckpointError(
                f"{self._folder} holds checkpoints of different runs on different nodes: "
                f"{', '.join(sorted({f'{each.run} of {each.run_dir}' for each in disks}))} (the field run of its "
                f"{FILE}). Use another run.dir, or move that folder aside on the nodes where it is another run's"
            )
        return False

    def _refuse(self, fresh: RunHistory) -> None:
        assert self._mirrored is not None
        assert isinstance(self._there, RunHistory)
        other, mirror = self._there.run_dir, self._mirrored.mirror
        which = f"run.dir={other}" if other != fresh.run_dir else f"an earlier run of run.dir={other}"
        same = f"run.dir={other} to go on with that run, " if other != fresh.run_dir else ""
        raise CheckpointError(
            f"checkpoint.mirror={mirror} belongs to another run: it mirrors {which}, not what is in "
            f"run.dir={fresh.run_dir} now. Use another checkpoint.mirror, {same}or checkpoint.resume={mirror} to go on "
            "from there on purpose"
        )


def _read(root: Location) -> RunHistory | DamagedError | None:
    try:
        return read(root)
    except DamagedError as error:
        return error
