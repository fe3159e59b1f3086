"""Survey of the checkpoints from which a run may resume: on each disk and in the mirror."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from nxtrain.checkpoint import directory, mirror
from nxtrain.checkpoint.load import open_checkpoint
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.rewinds import Records, RunHistory
from nxtrain.checkpoint.run_locations import MIRROR, RunLocations
from nxtrain.common.errors import DamagedError, NxtrainError
from nxtrain.common.io.object_store import Location, location_of

Version = tuple[int, int]
"""Version of a checkpoint: its step, and the checksum of its manifest."""

LOOKING = "cannot look for checkpoints"
"""Beginning of the error message of a failed survey."""


@dataclass(frozen=True)
class ResumeRequest:
    """Request to resume a run, from its configuration and scheduler.

    Args:
        resume: Value of `checkpoint.resume`.
        is_restart: The scheduler or agent restarted the same command.
        job: Name of the scheduler's or agent's job.
    """

    resume: str
    is_restart: bool = False
    job: str = ""

    def goes_on(self, history: RunHistory) -> bool:
        """True if the run resumes from its own newest checkpoint: by default, or once the requested rewind is done."""
        return self.resume == "auto" or (self.is_restart and history.has_rewound(self.resume, self.job))


@dataclass(frozen=True)
class LocationSurvey:
    """Checkpoints in one location: a disk or the mirror.

    Args:
        seals: Manifest checksum of each complete checkpoint, by step; 0 in a run without a mirror.
        damaged: Damage that is not yet handled, by step.
        unread: Steps of checkpoints that this start could not read.
        quarantined: Step of each quarantined checkpoint, by name.
        remnants: Names that show that checkpoints of the location were lost.
    """

    seals: Mapping[int, int] = field(default_factory=dict)
    damaged: Mapping[int, DamagedError] = field(default_factory=dict)
    unread: frozenset[int] = frozenset()
    quarantined: Mapping[str, int] = field(default_factory=dict)
    remnants: tuple[str, ...] = ()

    @property
    def last(self) -> int:
        """Last step of all checkpoints of the location, including quarantined ones; -1 if there are none."""
        return max((-1, *self.seals, *self.damaged, *self.unread, *self.quarantined.values()))


@dataclass(frozen=True)
class ResumeSurvey:
    """Survey of all locations of a run's checkpoints, equal on all ranks.

    Args:
        folder: Folder `checkpoints` of the run.
        mirror: Root of the mirror; None without a mirror.
        records: Records of the run's rewinds.
        is_shared: All nodes share the folder.
        locations: Checkpoints of each disk, by its leader's rank, and of the mirror, by `MIRROR`. Empty for a rewind.
        files: Files of each version whose manifest was read, by the leader of the disk; True for files of full length.
        rejected: Versions whose upload to the mirror found damage in this start.
        requested: Checkpoint at the requested path, or the error of the search; None if no path is requested.
        step_on_disk: Step of the requested checkpoint if it is in the run's own folder.
        step_in_mirror: Step of the requested checkpoint if it is in the run's mirror.
    """

    folder: Path
    mirror: Location | None
    records: Records
    is_shared: bool = True
    locations: Mapping[int, LocationSurvey] = field(default_factory=dict)
    files: Mapping[Version, Mapping[int, Mapping[str, bool]]] = field(default_factory=dict)
    rejected: frozenset[Version] = frozenset()
    requested: Location | NxtrainError | None = None
    step_on_disk: int | None = None
    step_in_mirror: int | None = None

    @property
    def damaged(self) -> dict[int, Mapping[int, DamagedError]]:
        """Damage that is not yet handled, by location and step."""
        return {where: location.damaged for where, location in self.locations.items() if location.damaged}

    def is_mirrored(self, version: Version) -> bool:
        """True if the mirror has a complete checkpoint of this version."""
        step, seal = version
        return MIRROR in self.locations and self.locations[MIRROR].seals.get(step) == seal

    def versions(self, request: ResumeRequest) -> list[Version]:
        """List the versions from which the run may resume, newest first."""
        versions = set[Version]()
        for location in self.locations.values():
            versions.update(location.seals.items())
        versions -= self.rejected
        if request.resume == "never":  # a converted checkpoint of step 0 is not a start from scratch
            versions = {version for version in versions if version[0] > 0}
        # If a step was written twice, the version on the disks is the later one.
        return sorted(
            versions, key=lambda version: (version[0], not self.is_mirrored(version), version[1]), reverse=True
        )

    def problem_of(self, version: Version) -> str:
        """Reason why a version is incomplete on the disks, once its manifests are read; empty if it is complete."""
        if self.is_mirrored(version):
            return ""
        whole: dict[str, bool] = {}
        for files in self.files[version].values():
            for name, is_whole in files.items():
                whole[name] = whole.get(name, False) or is_whole
        absent = sorted(name for name, is_whole in whole.items() if not is_whole)
        if absent:
            return f"no disk holds its {absent[0]} whole"
        if not whole:
            return "its manifest is gone"
        return ""


def take_survey(
    locations: RunLocations,
    records: Records,
    request: ResumeRequest,
    unread: frozenset[tuple[int, int]] = frozenset(),
    rejected: frozenset[Version] = frozenset(),
) -> ResumeSurvey:
    """Survey all locations of a run's checkpoints. Every rank calls this.

    Args:
        locations: Locations of the run's checkpoints.
        records: Records of the run's rewinds.
        request: Resume request of the start.
        unread: Location and step of checkpoints to skip, since this start could not read them.
        rejected: Versions to skip, since their upload found damage.
    """
    folder, there = locations.folder, locations.mirror
    survey = ResumeSurvey(folder, locations.root, records, locations.scope.number == 1, rejected=rejected)
    if request.resume not in {"auto", "never"}:
        survey = _with_requested(survey, locations, request)
    if not request.goes_on(records.newest):
        return survey
    here = locations.scope.leader
    lists = locations.act(
        lambda: _list_disk(folder, _steps_of(here, unread), is_mirrored=there is not None),
        lambda there: _list_mirror(there, _steps_of(MIRROR, unread)),
        LOOKING,
    )
    survey = replace(survey, locations=lists)
    if there is None:
        return survey

    def read(version: Version) -> dict[int, dict[str, bool] | DamagedError]:
        is_unread = (here, version[0]) in unread
        action = f"{LOOKING} in {folder}"
        return locations.scope.on_each(lambda: {} if is_unread else _read_files(folder, version), action)

    return read_manifests(survey, request, read)


def read_manifests(
    survey: ResumeSurvey,
    request: ResumeRequest,
    read: Callable[[Version], Mapping[int, Mapping[str, bool] | DamagedError]],
) -> ResumeSurvey:
    """Read manifests of the newest versions on all disks, until a version is complete or damage is found.

    Reading all manifests would take minutes on slow disks.
    """
    for version in survey.versions(request):
        if survey.damaged:
            break
        lists = dict(survey.locations)
        files: dict[int, Mapping[str, bool]] = {}
        for leader, result in read(version).items():
            if isinstance(result, DamagedError):
                lists[leader] = replace(lists[leader], damaged={version[0]: result})
            elif result:
                files[leader] = result
        survey = replace(survey, locations=lists, files={**survey.files, version: files})
        if not survey.problem_of(version):
            break
    return survey


def _with_requested(survey: ResumeSurvey, locations: RunLocations, request: ResumeRequest) -> ResumeSurvey:
    """Add the checkpoint at the requested path to a survey."""
    ranks, root = locations.scope.ranks, survey.mirror
    try:
        checkpoint = ranks.on_leader(lambda: mirror.locate_checkpoint(request.resume), LOOKING)
    except NxtrainError as error:  # not an error for a run that resumes from its own checkpoints
        return replace(survey, requested=error)
    on_disk = ranks.on_leader(lambda: mirror.step_in(survey.folder, checkpoint), LOOKING)
    in_mirror = None
    if root is not None:
        in_mirror = ranks.on_leader(lambda: mirror.step_in(root, checkpoint), LOOKING)
    return replace(survey, requested=checkpoint, step_on_disk=on_disk, step_in_mirror=in_mirror)


def _steps_of(where: int, unread: frozenset[tuple[int, int]]) -> frozenset[int]:
    return frozenset(step for location, step in unread if location == where)


def _list_disk(folder: Path, unread: frozenset[int], *, is_mirrored: bool) -> LocationSurvey:
    """Survey the checkpoints of a disk; metadata is read only if the run has a mirror."""
    checkpoints: dict[int, Location] = {}
    for path in directory.list_checkpoints(folder):
        if directory.step_of(path) not in unread:
            checkpoints[directory.step_of(path)] = path
    seals = dict.fromkeys(checkpoints, 0)
    damaged: dict[int, DamagedError] = {}
    if is_mirrored:
        seals, damaged = _read_seals(checkpoints)
    for path in directory.incomplete(folder):
        reason = "the file is missing, so the checkpoint is incomplete"
        damaged[directory.step_of(path)] = DamagedError(path / directory.META, reason)
    names = {path.name: directory.step_of(path) for path in directory.quarantined(folder)}
    return LocationSurvey(seals, damaged, unread, names, tuple(directory.remnants(folder)))


def _list_mirror(there: mirror.Mirror, unread: frozenset[int]) -> LocationSurvey:
    seals, damaged = _read_seals({step: there.folder(step) for step in there.steps() if step not in unread})
    names = {address: directory.step_of(location_of(address)) for address in there.quarantined()}
    return LocationSurvey(seals, damaged, unread, names, tuple(there.remnants()))


def _read_seals(checkpoints: Mapping[int, Location]) -> tuple[dict[int, int], dict[int, DamagedError]]:
    """Read the manifest checksum of each checkpoint from its metadata, and collect damaged metadata."""
    seals: dict[int, int] = {}
    damaged: dict[int, DamagedError] = {}
    for step, checkpoint in checkpoints.items():
        try:
            seals[step] = read_meta(checkpoint).manifest_crc32
        except DamagedError as error:
            damaged[step] = error
    return seals, damaged


def _read_files(folder: Path, version: Version) -> dict[str, bool] | DamagedError:
    """List the files of a version on this disk, True for files of full length; empty if the disk lacks the version."""
    path = directory.step_path(folder, version[0])
    try:
        if not directory.is_checkpoint(path) or read_meta(path).manifest_crc32 != version[1]:
            return {}
        _, manifest = open_checkpoint(path)
    except DamagedError as error:
        return error
    files: dict[str, bool] = {}
    for name, entry in manifest.files.items():
        file = path / name
        files[name] = file.is_file() and file.stat().st_size == entry.num_bytes
    return files
