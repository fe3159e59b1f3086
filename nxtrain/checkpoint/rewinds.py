"""Record of a run's rewinds, on each disk and in the mirror, so that no start resumes from abandoned checkpoints.

A run rewinds on request: `checkpoint.resume=never` or a path. By the record, a restart recognises that the rewind is
done, and a disk or a mirror that was offline during the rewind learns its abandoned checkpoints.
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nxtrain.checkpoint.run_locations import MIRROR, RunLocations
from nxtrain.common.errors import DamagedError
from nxtrain.common.io.atomic import replace_bytes
from nxtrain.common.io.object_store import Location, content_of
from nxtrain.common.io.read_retry import damage, unsteady

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

    def has_rewound(self, requested: str, job: str) -> bool:
        """True if the last rewind has this request and this job."""
        return bool(self.returns) and (self.returns[-1].told, self.returns[-1].job) == (requested, job)

    def with_rewind(self, rewind: Rewind) -> RunHistory:
        """Copy of the record with a further rewind."""
        return self.model_copy(update={"returns": (*self.returns, rewind)})

    def keeps(self, num_seen: int) -> int | None:
        """Last step that stays in a location that has seen only the first `num_seen` rewinds; None: all steps stay."""
        return min((rewind.keeps for rewind in self.returns[num_seen:] if rewind.keeps is not None), default=None)

    def sealed(self) -> bytes:
        """Content of `lineage.json`, with its checksum."""
        return (json.dumps({**self.model_dump(mode="json"), _SEAL: self._checksum()}, indent=2) + "\n").encode()

    def _checksum(self) -> int:
        return zlib.crc32(json.dumps(self.model_dump(mode="json")).encode())


def read(root: Location) -> RunHistory | None:
    """Read the record of a `checkpoints` folder or of a mirror; None: there is none."""
    file = root / FILE
    try:
        content = json.loads(unsteady.read(lambda: content_of(file), file))
        seal = content.pop(_SEAL)
        history = RunHistory.model_validate_json(json.dumps(content))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damage(file, error) from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DamagedError(file, "it is no record of a run") from error
    if seal != history._checksum():
        raise DamagedError(file, "its content is not what was written")
    return history


def write(folder: Path, history: RunHistory) -> None:
    """Write the record of a `checkpoints` folder, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_bytes(folder / FILE, history.sealed(), durable=True)


Record = RunHistory | DamagedError | None
"""Record of one location; None: the location has none."""


@dataclass(frozen=True)
class Records:
    """Records of all locations of a run, by `RunLocations`' keys, and the record of a new run in the run folder."""

    locations: Mapping[int, Record]
    fresh: RunHistory

    @property
    def damaged(self) -> list[DamagedError]:
        """Damage of the unreadable records."""
        return [record for _, record in sorted(self.locations.items()) if isinstance(record, DamagedError)]

    @property
    def newest(self) -> RunHistory:
        """Record with the most rewinds of all locations; a new record if the mirror belongs to another run."""
        newest = self.fresh
        if not self.is_foreign and self._readable:
            histories = [history for _, history in self._readable]
            newest = max(histories, key=lambda history: len(history.returns))
        return newest.model_copy(update={"run_dir": self.fresh.run_dir})

    @property
    def is_foreign(self) -> bool:
        """True if the mirror belongs to another run."""
        mirror = dict(self._readable).get(MIRROR)
        if mirror is None:
            return False
        if not self._runs:  # nodes were replaced, if the mirror's run has the same folder
            return mirror.run_dir != self.fresh.run_dir
        return mirror.run not in self._runs

    @property
    def up_to_date(self) -> set[int]:
        """Locations that have seen all rewinds."""
        num_rewinds = len(self.newest.returns)
        return {where for where, history in self._readable if len(history.returns) == num_rewinds}

    def missed(self, where: int) -> int | None:
        """Last step that stays in a location, by the rewinds that its record lacks; None: all steps stay."""
        record = self.locations[where]
        # An unreadable record alone does not mean that the location has missed a rewind.
        if isinstance(record, DamagedError):
            return None
        num_seen = 0
        if record is not None:
            num_seen = len(record.returns)
        return self.newest.keeps(num_seen)

    def conflict(self, folder: Path, mirror: Location | None, *, takes_over: bool) -> str:
        """Error for locations of different runs, unless the run takes over the mirror on request; else empty."""
        if self.is_foreign:
            if takes_over:
                return ""
            other, ours = dict(self._readable)[MIRROR].run_dir, self.fresh.run_dir
            which = f"an earlier run of run.dir={other}"
            same = ""
            if other != ours:
                which = f"run.dir={other}"
                same = f"run.dir={other} to go on with that run, "
            return (
                f"checkpoint.mirror={mirror} belongs to another run: it mirrors {which}, not what is in "
                f"run.dir={ours} now. Use another checkpoint.mirror, {same}or checkpoint.resume={mirror} to go on "
                "from there on purpose"
            )
        if len(self._runs) < 2:  # noqa: PLR2004
            return ""
        return (
            f"{folder} holds checkpoints of different runs on different nodes: "
            f"{', '.join(sorted(f'{run} of {run_dir}' for run, run_dir in self._runs.items()))} (the field run of its "
            f"{FILE}). Use another run.dir, or move that folder aside on the nodes where it is another run's"
        )

    @property
    def _readable(self) -> list[tuple[int, RunHistory]]:
        return [(where, record) for where, record in sorted(self.locations.items()) if isinstance(record, RunHistory)]

    @property
    def _runs(self) -> dict[str, str]:
        """Folders of the runs on the disks, by identity."""
        return {history.run: history.run_dir for where, history in self._readable if where != MIRROR}


def read_records(locations: RunLocations) -> Records:
    """Read the records of all locations. Every rank calls this."""
    folder = locations.folder
    records = locations.act(lambda: _read(folder), lambda mirror: _read(mirror.store.root), f"cannot read {FILE}")
    fresh = locations.scope.ranks.on_leader(
        lambda: RunHistory(run=uuid.uuid4().hex, run_dir=os.path.abspath(folder.parent)), "no name for a run"
    )
    return Records(records, fresh)


def write_records(
    records: Records, newest: RunHistory, locations: RunLocations, *, only: Container[int] | None = None
) -> Records:
    """Update the records of all locations, or of `only` some. Every rank calls this.

    The mirror's is first, so that the loss of a disk loses no rewind.
    """
    due = set[int]()
    for where, record in records.locations.items():
        if record != newest and (only is None or where in only):
            due.add(where)
    folder, scope = locations.folder, locations.scope
    if locations.mirror is not None and MIRROR in due:
        store = locations.mirror.store
        scope.ranks.on_leader(lambda: store.put(FILE, newest.sealed()), f"cannot write {store.root / FILE}")

    def write_if_due() -> None:
        if scope.leader in due:
            write(folder, newest)

    scope.on_each(write_if_due, f"cannot write {folder / FILE}")
    return replace(records, locations={**records.locations, **dict.fromkeys(due, newest)})


def _read(root: Location) -> Record:
    try:
        return read(root)
    except DamagedError as error:
        return error
