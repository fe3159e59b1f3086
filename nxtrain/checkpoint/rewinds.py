"""Record of a run's rewinds (`lineage.json`) on each disk and in the mirror.

A rewind is requested by `checkpoint.resume=never` or a path. With the record, a restart recognizes that the rewind is
done. A disk or mirror that was offline during the rewind later abandons the same checkpoints.
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
from nxtrain.common.io.read_retry import damage, retry_budget

FILE = "lineage.json"
_SEAL = "crc32"


class Rewind(BaseModel):
    """One rewind of a run to an earlier checkpoint, as recorded in `lineage.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    told: str
    """Requested value of `checkpoint.resume`; empty for a repeated request that is not carried out yet."""
    job: str = ""
    """Name of the scheduler's or agent's job that made the request."""
    keeps: int | None = None
    """Last step that remains part of the run; -1 for no step, None for all steps."""


class RunHistory(BaseModel):
    """Identity of a run and its rewinds, the content of `lineage.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str
    """Random identifier of the run."""
    run_dir: str
    """Absolute path of the run's folder, as configured."""
    returns: tuple[Rewind, ...] = ()
    """Rewinds of the run, oldest first."""

    def has_rewound(self, requested: str, job: str) -> bool:
        """True if the last rewind was requested by this value of `checkpoint.resume` in this job."""
        return bool(self.returns) and (self.returns[-1].told, self.returns[-1].job) == (requested, job)

    def with_rewind(self, rewind: Rewind) -> RunHistory:
        """Return a copy of the record with another rewind."""
        return self.model_copy(update={"returns": (*self.returns, rewind)})

    def keeps(self, num_seen: int) -> int | None:
        """Last step to keep in a location that recorded only the first `num_seen` rewinds; None to keep all steps."""
        return min((rewind.keeps for rewind in self.returns[num_seen:] if rewind.keeps is not None), default=None)

    def sealed(self) -> bytes:
        """Return the content of `lineage.json`, with its checksum."""
        return (json.dumps({**self.model_dump(mode="json"), _SEAL: self._checksum()}, indent=2) + "\n").encode()

    def _checksum(self) -> int:
        return zlib.crc32(json.dumps(self.model_dump(mode="json")).encode())


def read(root: Location) -> RunHistory | None:
    """Read the record of rewinds of a `checkpoints` folder or a mirror; None if there is no record.

    Raises:
        DamagedError: The record is damaged.
    """
    file = root / FILE
    try:
        content = json.loads(retry_budget.read(lambda: content_of(file), file))
        seal = content.pop(_SEAL)
        history = RunHistory.model_validate_json(json.dumps(content))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damage(file, error) from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DamagedError(file, "it is not a valid record of a run") from error
    if seal != history._checksum():
        raise DamagedError(file, "its checksum does not match its content")
    return history


def write(folder: Path, history: RunHistory) -> None:
    """Write the record of rewinds of a `checkpoints` folder, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_bytes(folder / FILE, history.sealed(), durable=True)


Record = RunHistory | DamagedError | None
"""Record of rewinds of one location, the error of a damaged record, or None without a record."""


@dataclass(frozen=True)
class Records:
    """Records of rewinds of all locations of a run.

    Args:
        locations: Record of each location, by the keys of `RunLocations`.
        fresh: Record for a new run in this run folder.
    """

    locations: Mapping[int, Record]
    fresh: RunHistory

    @property
    def damaged(self) -> list[DamagedError]:
        """Errors of damaged records, by location."""
        return [record for _, record in sorted(self.locations.items()) if isinstance(record, DamagedError)]

    @property
    def newest(self) -> RunHistory:
        """Record with the most rewinds among all locations; a new record if the mirror belongs to another run."""
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
        if not self._runs:  # all nodes were replaced, if the mirror's run has the same folder
            return mirror.run_dir != self.fresh.run_dir
        return mirror.run not in self._runs

    @property
    def up_to_date(self) -> set[int]:
        """Locations whose record contains all rewinds."""
        num_rewinds = len(self.newest.returns)
        return {where for where, history in self._readable if len(history.returns) == num_rewinds}

    def missed(self, where: int) -> int | None:
        """Last step to keep in a location, according to the rewinds that its record lacks; None to keep all steps."""
        record = self.locations[where]
        # A damaged record does not mean that the location has missed a rewind.
        if isinstance(record, DamagedError):
            return None
        num_seen = 0
        if record is not None:
            num_seen = len(record.returns)
        return self.newest.keeps(num_seen)

    def conflict(self, folder: Path, mirror: Location | None, *, takes_over: bool) -> str:
        """Error message if the locations belong to different runs; empty if the run may use all of them.

        Args:
            folder: Folder `checkpoints` of the run.
            mirror: Root of the mirror.
            takes_over: The run was requested to resume from a checkpoint of the mirror.
        """
        if self.is_foreign:
            if takes_over:
                return ""
            other, ours = dict(self._readable)[MIRROR].run_dir, self.fresh.run_dir
            which = f"an earlier run of run.dir={other}"
            same = ""
            if other != ours:
                which = f"run.dir={other}"
                same = f"run.dir={other} to continue that run, "
            return (
                f"checkpoint.mirror={mirror} belongs to another run: it mirrors {which}, not the run in "
                f"run.dir={ours}. Use another checkpoint.mirror, {same}or checkpoint.resume={mirror} to continue from "
                "the mirror on purpose"
            )
        if len(self._runs) < 2:  # noqa: PLR2004
            return ""
        return (
            f"{folder} holds checkpoints of different runs on different nodes: "
            f"{', '.join(sorted(f'{run} of {run_dir}' for run, run_dir in self._runs.items()))} (the field run of its "
            f"{FILE}). Use another run.dir, or rename that folder on the nodes where it belongs to another run"
        )

    @property
    def _readable(self) -> list[tuple[int, RunHistory]]:
        return [(where, record) for where, record in sorted(self.locations.items()) if isinstance(record, RunHistory)]

    @property
    def _runs(self) -> dict[str, str]:
        """Folders of the runs on the disks, by the identifier of the run."""
        return {history.run: history.run_dir for where, history in self._readable if where != MIRROR}


def read_records(locations: RunLocations) -> Records:
    """Read the records of rewinds of all locations. Every rank calls this."""
    folder = locations.folder
    records = locations.act(lambda: _read(folder), lambda mirror: _read(mirror.store.root), f"cannot read {FILE}")
    fresh = locations.scope.ranks.on_leader(
        lambda: RunHistory(run=uuid.uuid4().hex, run_dir=os.path.abspath(folder.parent)), "cannot name the run"
    )
    return Records(records, fresh)


def write_records(
    records: Records, newest: RunHistory, locations: RunLocations, *, only: Container[int] | None = None
) -> Records:
    """Write the newest record of rewinds to all locations, or to the locations in `only`. Every rank calls this.

    The mirror's record is written first, so the loss of a disk loses no rewind.
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
