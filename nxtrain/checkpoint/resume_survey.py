"""Survey of the checkpoints of a run in all locations, as far as they are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from nxtrain.checkpoint.rewinds import MIRROR, Records
from nxtrain.common.errors import DamagedError
from nxtrain.common.io.object_store import Location

T = TypeVar("T")

Version = tuple[int, int]
"""Step of a checkpoint, and the checksum of its manifest."""


@dataclass(frozen=True)
class LocationSurvey:
    """Checkpoints in one location.

    Args:
        seals: Checksum of the manifest of each complete checkpoint, by step; 0 if a run without mirror reads none.
        damaged: Damage that is not acted on yet, by step.
        unread: Steps whose metadata or manifest the storage failed to read.
        quarantined: Step of each quarantined checkpoint, by name.
        remnants: Names that show that the location held checkpoints which are gone.
    """

    seals: Mapping[int, int] = field(default_factory=dict)
    damaged: Mapping[int, DamagedError] = field(default_factory=dict)
    unread: frozenset[int] = frozenset()
    quarantined: Mapping[str, int] = field(default_factory=dict)
    remnants: tuple[str, ...] = ()

    def until(self, last: int, *, damaged: bool) -> LocationSurvey:
        """The location after later checkpoints are abandoned, with `damaged` also quarantined ones."""
        names = {name: step for name, step in self.quarantined.items() if step <= last or not damaged}
        unread = frozenset(step for step in self.unread if step <= last)
        return LocationSurvey(_until(self.seals, last), _until(self.damaged, last), unread, names, self.remnants)

    def without(self, names: Mapping[int, str]) -> LocationSurvey:
        """The location after damaged steps got the given names in quarantine; steps without a name are unread."""
        quarantined = {name: step for step, name in names.items() if name}
        return LocationSurvey(
            {step: seal for step, seal in self.seals.items() if step not in names},
            {step: error for step, error in self.damaged.items() if step not in names},
            self.unread | {step for step, name in names.items() if not name},
            {**self.quarantined, **quarantined},
            self.remnants,
        )

    @property
    def last(self) -> int:
        """Last step of any checkpoint, quarantined ones included; -1: there is none."""
        return max((-1, *self.seals, *self.damaged, *self.unread, *self.quarantined.values()))


@dataclass(frozen=True)
class Holding:
    """Files of one checkpoint on one disk.

    Args:
        wanted: Names of the files of all ranks; empty if the disk has no manifest.
        present: Names of the files on this disk that have the right length.
    """

    wanted: tuple[str, ...] = ()
    present: tuple[str, ...] = ()


@dataclass(frozen=True)
class Located:
    """A requested checkpoint.

    Args:
        place: Location of the checkpoint.
        step_on_disk: Its step if it is in the run's own folder.
        step_in_mirror: Its step if it is in the run's mirror.
    """

    place: Location
    step_on_disk: int | None = None
    step_in_mirror: int | None = None


@dataclass(frozen=True)
class ResumeSurvey:
    """Content of all locations of a run, as far as it is known.

    Args:
        folder: The `checkpoints` folder.
        mirror: Address of the mirror; empty: there is none.
        records: Rewinds of the run.
        is_shared: All ranks see the same folder.
        places: Checkpoints of each disk, by its leader, and of the mirror as `MIRROR`; None: not listed yet.
        holdings: Files of a version on each disk, by leader; of versions whose manifests are read.
        rejected: Versions that are incomplete or damaged.
        uploaded: The version that this start copied to the mirror.
        unread: Steps that this start failed to read.
        located: The requested checkpoint, once found.
    """

    folder: Path
    mirror: str
    records: Records
    is_shared: bool = True
    places: Mapping[int, LocationSurvey] | None = None
    holdings: Mapping[Version, Mapping[int, Holding]] = field(default_factory=dict)
    rejected: frozenset[Version] = frozenset()
    uploaded: Version | None = None
    unread: frozenset[int] = frozenset()
    located: Located | None = None

    @property
    def listed(self) -> Mapping[int, LocationSurvey]:
        """Checkpoints of each location."""
        assert self.places is not None
        return self.places

    @property
    def in_mirror(self) -> Mapping[int, int]:
        """Checksum of the manifest of each checkpoint of the mirror, by step."""
        return self.listed.get(MIRROR, LocationSurvey()).seals

    def abandoned(self, after: Mapping[int, int], *, damaged: bool) -> ResumeSurvey:
        """The survey once the checkpoints after a step of each location are abandoned."""
        shortened = {where: self.listed[where].until(last, damaged=damaged) for where, last in after.items()}
        return replace(self, places={**self.listed, **shortened})

    def quarantined(self, names: Mapping[int, Mapping[int, str]]) -> ResumeSurvey:
        """The survey after a quarantine: the new name of each step in each location; no name: it is unread."""
        places = {where: location.without(names.get(where, {})) for where, location in self.listed.items()}
        return replace(self, places=places)

    def inspected(self, version: Version, results: Mapping[int, Holding | DamagedError]) -> ResumeSurvey:
        """The survey after the manifests of a version are read."""
        step, places = version[0], dict(self.listed)
        holdings: dict[int, Holding] = {}
        for leader, result in results.items():
            if isinstance(result, DamagedError):
                places[leader] = replace(places[leader], damaged={**places[leader].damaged, step: result})
                holdings[leader] = Holding()
            else:
                holdings[leader] = result
        return replace(self, places=places, holdings={**self.holdings, version: holdings})

    def with_upload(self, version: Version) -> ResumeSurvey:
        """The survey after a version is copied to the mirror."""
        copies = replace(self.listed[MIRROR], seals={**self.in_mirror, version[0]: version[1]})
        return replace(self, places={**self.listed, MIRROR: copies}, uploaded=version)

    def passed_over(self, version: Version) -> ResumeSurvey:
        """The survey after a version is found incomplete or damaged."""
        return replace(self, rejected=self.rejected | {version})

    def given_up(self, step: int) -> ResumeSurvey:
        """The survey after all versions of a step are damaged."""
        versions = {version for version in self.holdings if version[0] == step}
        return replace(self, rejected=self.rejected | versions, uploaded=None)


def _until(steps: Mapping[int, T], last: int) -> dict[int, T]:
    return {step: value for step, value in steps.items() if step <= last}
