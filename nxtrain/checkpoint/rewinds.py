"""What a run has gone back from: a record on each disk and in the mirror, so that nobody takes up again what was left.

A run goes back when it is told to (`checkpoint.resume=never` or a path). A restart then knows that it has, and a disk
that was away meanwhile, or a mirror, what of its checkpoints is no part of the run any more.
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.mirror import Mirrored
from nxtrain.distributed.agreement import Group, by_leader, gather, shared_disk, together
from nxtrain.errors import CheckpointError, DamagedError
from nxtrain.io.atomic import sync_folder, write_durably
from nxtrain.io.object_store import Place, content_of
from nxtrain.io.read_retry import damage, unsteady
from nxtrain.mesh import Mesh
from nxtrain.run_folder import CHECKPOINTS_DIR

T = TypeVar("T")

FILE = "lineage.json"
_SEAL = "crc32"


class Return(BaseModel):
    """One time that a run went back."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    told: str
    """`checkpoint.resume`, as given; empty: what was told before is told anew, and not done yet."""
    job: str = ""
    """Who told it: the scheduler's or the agent's name for what it starts again."""
    keeps: int | None = None
    """The last step that stays part of the run; -1: none does; None: all do."""


class Lineage(BaseModel):
    """What is known of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str
    """Its identity."""
    run_dir: str
    """Its folder, as configured, from the root."""
    returns: tuple[Return, ...] = ()
    """The times that it went back, in their order."""

    def has_returned(self, told: str, job: str) -> bool:
        """Whether the last thing that it did on purpose was to go back as told."""
        return bool(self.returns) and (self.returns[-1].told, self.returns[-1].job) == (told, job)

    def keeps(self, known: int) -> int | None:
        """The last step that stays where only so many of the returns are known; None: all do."""
        return min((each.keeps for each in self.returns[known:] if each.keeps is not None), default=None)

    def sealed(self) -> bytes:
        """The content of `lineage.json`."""
        return (json.dumps({**self.model_dump(mode="json"), _SEAL: self._checksum()}, indent=2) + "\n").encode()

    def _checksum(self) -> int:
        return zlib.crc32(json.dumps(self.model_dump(mode="json")).encode())


def read(root: Place) -> Lineage | None:
    """Read the record of a `checkpoints` folder or of a mirror; None: there is none.

    Raises:
        DamagedError: It is no longer what was written.
    """
    file = root / FILE
    try:
        content = json.loads(unsteady.read(lambda: content_of(file), file))
        seal = content.pop(_SEAL)
        found = Lineage.model_validate_json(json.dumps(content))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damage(file, error) from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DamagedError(file, "it is no record of a run") from error
    if seal != found._checksum():
        raise DamagedError(file, "its content is not what was written")
    return found


def write(folder: Path, lineage: Lineage) -> None:
    """Write the record of a `checkpoints` folder, in one step for whoever looks."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{FILE}"
    write_durably(draft, lambda file: file.write_bytes(lineage.sealed()))
    draft.replace(folder / FILE)
    sync_folder(folder)


class Records:
    """The records of a run on its disks and in its mirror. Every rank makes one, and calls it alike.

    Args:
        run_dir: Folder of the run.
        mirrored: Its mirror, if it has one.
        mesh: The axes of this rank.
        group: Group of all ranks that can carry host objects; None for the default group.
        takes_over: The run is told to go on from this mirror, whosever it is.

    Attributes:
        newest: What is known of the run, in any place.
        damaged: Those that cannot be read.

    Raises:
        CheckpointError: The mirror, or a disk, is that of another run.
    """

    def __init__(
        self,
        run_dir: Path,
        mirrored: Mirrored | None,
        mesh: Mesh,
        group: Group,
        *,
        takes_over: bool,
    ) -> None:
        self._folder, self._mirrored, self._mesh, self._group = run_dir / CHECKPOINTS_DIR, mirrored, mesh, group
        self._disk = mirrored.disk if mirrored else shared_disk(mesh)
        self._there: Lineage | DamagedError | None = None
        if mirrored is not None:
            root = mirrored.mirror.store.root
            self._there = by_leader(lambda: _read(root), mesh, group, f"cannot read {root / FILE}")
        mine, disks = self._on_each(lambda: _read(self._folder), f"cannot read {self._folder / FILE}")
        self._here = mine[0] if mine else None
        self.damaged = [found for found in (self._there, *disks) if isinstance(found, DamagedError)]
        folder, new = by_leader(lambda: (os.path.abspath(run_dir), uuid.uuid4().hex), mesh, group, "no name for a run")
        fresh = Lineage(run=new, run_dir=folder)
        known = [found for found in (self._there, *disks) if isinstance(found, Lineage)]
        self._is_new = self._belongs_to_others([found for found in disks if isinstance(found, Lineage)], fresh)
        if self._is_new and not takes_over:
            self._refuse(fresh)
        newest = fresh if self._is_new else max(known, key=lambda each: len(each.returns), default=fresh)
        self.newest = newest.model_copy(update={"run_dir": folder})

    def put_aside_missed(self, *, on_disks: bool = True, in_mirror: bool = True) -> list[int]:
        """Put aside what the run went back from while a disk, or the mirror, was away; gives the steps."""
        here = -1 if self._is_new else self._missed(self._here)
        there = self._missed(self._there)
        return self._abandon(here if on_disks else None, there if in_mirror else None, damaged=True)

    def put_aside(self, after: int, *, damaged: bool) -> list[int]:
        """Put aside what lies after a step, everywhere; gives the steps.

        Args:
            after: The last step that stays.
            damaged: Those that were found to be damaged as well.
        """
        return self._abandon(after, after, damaged=damaged)

    def add(self, more: Return) -> None:
        """Note that the run went back, or is told to; written by `write`."""
        self.newest = self.newest.model_copy(update={"returns": (*self.newest.returns, more)})

    def write(self, known: int = 0) -> None:
        """Bring records up to date: the mirror's first, since what any disk knows must outlive it.

        Args:
            known: Only those that have so many returns, since the others still tell what they missed.
        """
        newest, mirrored = self.newest, self._mirrored

        def is_due(record: Lineage | DamagedError | None) -> bool:
            return record != newest and (not known or (isinstance(record, Lineage) and len(record.returns) >= known))

        def write_here() -> None:
            if is_due(self._here):
                write(self._folder, newest)
                self._here = newest

        if mirrored is not None and is_due(self._there):
            store = mirrored.mirror.store
            failure = f"cannot write {store.root / FILE}"
            by_leader(lambda: store.put(FILE, newest.sealed()), self._mesh, self._group, failure)
            self._there = newest
        self._disk.on_each(write_here, self._mesh, self._group, f"cannot write {self._folder / FILE}")

    def _missed(self, record: Lineage | DamagedError | None) -> int | None:
        # Where a record cannot be read, that alone is no reason to believe that the run was elsewhere.
        if isinstance(record, DamagedError):
            return None
        return self.newest.keeps(len(record.returns) if record else 0)

    def _abandon(self, here: int | None, there: int | None, *, damaged: bool) -> list[int]:
        failure = f"cannot put aside what is no longer part of the run in {self._folder}"
        _, gone = self._on_each(
            lambda: [] if here is None else directory.abandon(self._folder, here, damaged=damaged), failure
        )
        if self._mirrored is not None and there is not None:
            mirror, last = self._mirrored.mirror, there
            failure = f"cannot put aside what is no longer part of the run in {mirror}"
            gone.append(by_leader(lambda: mirror.abandon(last, damaged=damaged), self._mesh, self._group, failure))
        return sorted({step for steps in gone for step in steps})

    def _belongs_to_others(self, disks: list[Lineage], fresh: Lineage) -> bool:
        """Whether the mirror is that of another run; a disk that is ends the start."""
        there = self._there if isinstance(self._there, Lineage) else None
        if there is not None and not disks:  # of a node that was replaced, if the folder has the same name
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

    def _refuse(self, fresh: Lineage) -> None:
        assert self._mirrored is not None
        assert isinstance(self._there, Lineage)
        other, mirror = self._there.run_dir, self._mirrored.mirror
        which = f"run.dir={other}" if other != fresh.run_dir else f"an earlier run of run.dir={other}"
        same = f"run.dir={other} to go on with that run, " if other != fresh.run_dir else ""
        raise CheckpointError(
            f"checkpoint.mirror={mirror} belongs to another run: it mirrors {which}, not what is in "
            f"run.dir={fresh.run_dir} now. Use another checkpoint.mirror, {same}or checkpoint.resume={mirror} to go on "
            "from there on purpose"
        )

    def _on_each(self, action: Callable[[], T], failure: str) -> tuple[list[T], list[T]]:
        """Let the leader of each disk act; what it gave here, if this is one, and on all of them."""
        mine = list[T]()

        def act() -> None:
            if self._disk.leads:
                mine.append(action())

        together(act, self._mesh, self._group, failure)
        return mine, [each for some in gather(mine, self._mesh, self._group) for each in some]


def _read(root: Place) -> Lineage | DamagedError | None:
    try:
        return read(root)
    except DamagedError as error:
        return error
