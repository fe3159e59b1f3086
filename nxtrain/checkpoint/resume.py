"""Survey of the checkpoints that a run may resume from, and the effects of the plans that the survey leads to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from nxtrain.checkpoint import directory, mirror, resume_plan
from nxtrain.checkpoint.load import open_checkpoint
from nxtrain.checkpoint.manifest import CheckpointManifest
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.mirror import Mirror, Mirrored
from nxtrain.checkpoint.resume_plan import ResumeRequest, ResumeStart, named, plan_resume
from nxtrain.checkpoint.resume_survey import Holding, Located, LocationSurvey, ResumeSurvey, Version
from nxtrain.checkpoint.rewinds import MIRROR, Rewind, read_records, write_records
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.io.checksummed_file import FileDigest, verify
from nxtrain.common.io.object_store import Location, place_of
from nxtrain.common.io.read_retry import unsteady
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.config.schema import RunConfig

T = TypeVar("T")

LOOKING = "cannot look for checkpoints"
"""Start of the message of a failed survey."""


@dataclass(frozen=True)
class ResumeSource:
    """The checkpoint to resume from.

    Args:
        place: Location from which this rank reads.
        fallbacks: Other locations for blocks that are missing or damaged in `place`.
    """

    place: Location
    fallbacks: tuple[Location, ...] = ()


class ResumePlanner:
    """Finds the checkpoint to resume from; quarantines damaged checkpoints, and abandons those after a rewind.

    Every rank makes one planner, and makes the same calls.

    Args:
        config: Configuration of the run.
        mirrored: Mirror of the run, if it has one.
        ranks: All ranks of the run.
        print_line: Prints a line for people.
        restarted: True if, by this rank's environment, an agent or a scheduler restarted the same command.
        job: The agent's or scheduler's name for the restarted job; empty if it has none.
    """

    def __init__(
        self,
        config: RunConfig,
        mirrored: Mirrored | None,
        ranks: Ranks,
        print_line: Callable[[str], None],
        *,
        restarted: bool,
        job: str = "",
    ) -> None:
        self._folder = config.run.dir / CHECKPOINTS_DIR
        self._ranks = ranks
        self._print_line = print_line
        self._there: Mirror | None = None
        self._scope = StorageScope(ranks)
        if mirrored is not None:
            self._there = mirrored.mirror
            self._scope = mirrored.scope.over(ranks)
        self._manifests: dict[Version, CheckpointManifest] = {}
        # One restarted rank is enough: an agent that replaces another one has made no earlier start itself.
        answers = ranks.gather((restarted, job))
        resume = config.checkpoint.resume
        self._request = ResumeRequest(
            resume,
            is_restart=any(again for again, _ in answers),
            job=answers[0][1],
            aims_at_mirror=ranks.on_leader(lambda: self._aims_at_mirror(resume), LOOKING),
        )
        records = read_records(self._folder, self._there, self._scope)
        self._survey = ResumeSurvey(self._folder, str(self._there or ""), records, self._scope.number == 1)
        self._start = ResumeStart(own=False, abandon=resume_plan.Abandon({}), history=records.newest)
        self._chosen: ResumeSource | None = None

    @property
    def own(self) -> bool:
        """True if the run resumes from its own newest checkpoint, and damaged ones are quarantined.

        False if the run starts from another run's checkpoint, or rewinds on purpose.
        """
        return self._start.own

    def rewind(self, last: int) -> None:
        """Abandon the checkpoints after a step in all locations, and record that; called before `choose`.

        The record keeps the last request, which a restart does not repeat.
        """
        records = self._survey.records
        if records.conflict(self._folder, str(self._there or ""), takes_over=False):
            return  # `choose` refuses
        self._abandon(
            resume_plan.Abandon(dict.fromkeys(records.places, last)), f"the run goes back to step {last} or before"
        )
        newest = records.newest
        request = Rewind(told="")
        if newest.returns:
            request = newest.returns[-1]
        history = newest.model_copy(update={"returns": (*newest.returns, request.model_copy(update={"keeps": last}))})
        records = write_records(records, history, self._folder, self._there, self._scope)
        self._survey = replace(self._survey, records=records)

    def choose(self) -> ResumeSource | None:
        """Choose the checkpoint to resume from; None: start from scratch.

        Raises:
            CheckpointError: The mirror or a disk belongs to another run, the requested path has no checkpoint, or all
                checkpoints of the run are damaged.
        """
        while True:
            plan = plan_resume(self._survey, self._request)
            if isinstance(plan, resume_plan.Look | resume_plan.Locate | ResumeStart):
                for line in plan.lines:
                    self._print_line(line)
            if isinstance(plan, ResumeStart):
                self._start, self._chosen = plan, self._source(plan)
                return self._chosen
            self._survey = self._carry_out(plan)

    def quarantine(self, source: ResumeSource, error: DamagedError) -> str:
        """Quarantine a damaged checkpoint, and return a description for people.

        A checkpoint that cannot be read at all keeps its name, and the previous one is tried. If that cannot be read
        either, the storage has failed rather than the files.
        """
        step, failure = directory.step_of(source.place), f"cannot put aside {source.place.name}"
        if self._ranks.on_leader(lambda: error.unread, failure):
            self._survey = replace(self._survey, unread=self._survey.unread | {step}, uploaded=None)
            return "the one before it is tried"
        local, there = directory.step_path(self._folder, step), self._there
        names = self._on_places(
            lambda: {step: directory.quarantine(local).name} if directory.is_checkpoint(local) else {},
            lambda there: {step: there.quarantine(step)} if step in there.steps() else {},
            failure,
        )
        self._survey = self._survey.quarantined(names).given_up(step)
        if there is None:
            return f"the checkpoint is put aside as {names[0][step]}, and the one before it is tried"
        return f"step {step} is put aside on disks and in {there}, and the one before it is tried"

    def begin(self) -> None:
        """Start from the chosen checkpoint, after it was loaded: abandon later checkpoints, then record the rewind.

        The record comes last: if the start is interrupted before it, a restart rewinds again.
        """
        origin = "scratch"
        if self._chosen is not None:
            origin = str(self._chosen.place)
        self._abandon(self._start.abandon, f"the run goes on from {origin}")
        self._write_records(self._start)

    def _aims_at_mirror(self, resume: str) -> bool:
        if self._there is None or resume in {"auto", "never"}:
            return False
        requested, root = place_of(resume), self._there.store.root
        return mirror.is_same(requested, root) or mirror.step_in(root, requested) is not None

    def _source(self, start: ResumeStart) -> ResumeSource | None:
        if start.own:
            if start.step is None:
                return None
            locations: list[Location] = []
            for kind in start.sources[self._scope.leader]:
                if kind == "disk":
                    locations.append(directory.step_path(self._folder, start.step))
                elif self._there is not None:
                    locations.append(self._there.place(start.step))
            return ResumeSource(locations[0], tuple(locations[1:]))
        if self._survey.located is None:
            return None
        return ResumeSource(self._survey.located.place)

    def _carry_out(self, plan: resume_plan.Plan) -> ResumeSurvey:
        """Carry out a plan, and return the survey that it leads to."""
        survey = self._survey
        if isinstance(plan, resume_plan.Refuse):
            raise CheckpointError(plan.error)
        if isinstance(plan, resume_plan.Repeat):
            return self._write_records(plan, num_seen=plan.num_seen)
        if isinstance(plan, resume_plan.Look):
            return self._look()
        if isinstance(plan, resume_plan.Abandon):
            self._abandon(plan, "the run went back where this was not seen")
            return survey.abandoned(plan.after, damaged=plan.damaged)
        if isinstance(plan, resume_plan.Quarantine):
            return self._quarantine(plan)
        if isinstance(plan, resume_plan.Inspect):
            results = self._scope.on_each(lambda: self._inspect(plan.version), f"{LOOKING} in {self._folder}")
            return survey.inspected(plan.version, results)
        if isinstance(plan, resume_plan.PassOver):
            self._print_line(plan.line)
            return survey.passed_over(plan.version)
        if isinstance(plan, resume_plan.Upload):
            return self._upload(plan)
        assert isinstance(plan, resume_plan.Locate)
        return replace(survey, located=self._ranks.on_leader(self._locate, LOOKING))

    def _on_places(
        self, on_disk: Callable[[], T], in_mirror: Callable[[mirror.Mirror], T], failure: str
    ) -> dict[int, T]:
        """Act on each disk, by its leader, and then in the mirror."""
        results, there = self._scope.on_each(on_disk, f"{failure} in {self._folder}"), self._there
        if there is not None:
            results[MIRROR] = self._ranks.on_leader(lambda: in_mirror(there), f"{failure} in {there}")
        return results

    def _look(self) -> ResumeSurvey:
        is_mirrored = self._there is not None
        places = self._on_places(lambda: _list_disk(self._folder, is_mirrored=is_mirrored), _list_mirror, LOOKING)
        return replace(self._survey, places=places)

    def _abandon(self, plan: resume_plan.Abandon, why: str) -> None:
        def on_disk() -> list[int]:
            last = plan.after.get(self._scope.leader)
            if last is None:
                return []
            return directory.abandon(self._folder, last, damaged=plan.damaged)

        def in_mirror(there: Mirror) -> list[int]:
            last = plan.after.get(MIRROR)
            if last is None:
                return []
            return there.abandon(last, damaged=plan.damaged)

        abandoned = self._on_places(on_disk, in_mirror, "cannot put aside what is no longer part of the run")
        steps = set[int]().union(*abandoned.values())
        if steps:
            names = named(sorted(steps))
            self._print_line(f"{why}: put aside as abandoned, since no part of it any more: {names}")

    def _write_records(self, plan: resume_plan.Repeat | ResumeStart, num_seen: int = 0) -> ResumeSurvey:
        records = write_records(
            self._survey.records, plan.history, self._folder, self._there, self._scope, num_seen=num_seen
        )
        return replace(self._survey, records=records)

    def _quarantine(self, plan: resume_plan.Quarantine) -> ResumeSurvey:
        folder, mine = self._folder, plan.damaged.get(self._scope.leader, {})
        names = self._on_places(
            lambda: _put_aside(mine, lambda step: directory.quarantine(directory.step_path(folder, step)).name),
            lambda there: _put_aside(plan.damaged.get(MIRROR, {}), there.quarantine),
            LOOKING,
        )
        for where in sorted(names, key=lambda where: (where == MIRROR, where)):
            for step, name in names[where].items():
                effect = "it is passed over"
                if name and where == MIRROR:
                    effect = f"{name} is put aside"
                elif name:
                    effect = f"it is put aside as {name}"
                self._print_line(f"{plan.damaged[where][step]}; {effect}")
        return self._survey.quarantined(names)

    def _inspect(self, version: Version) -> Holding | DamagedError:
        path = directory.step_path(self._folder, version[0])
        try:
            if not directory.is_checkpoint(path) or read_meta(path).manifest_crc32 != version[1]:
                return Holding()
            _, manifest = open_checkpoint(path)
        except DamagedError as error:
            return error
        self._manifests[version] = manifest
        present = []
        for name, entry in manifest.files.items():
            if (path / name).is_file() and (path / name).stat().st_size == entry.num_bytes:
                present.append(name)
        return Holding(tuple(manifest.files), tuple(present))

    def _upload(self, plan: resume_plan.Upload) -> ResumeSurvey:
        there, scope = self._there, self._scope
        step = plan.version[0]
        assert there is not None
        path = directory.step_path(self._folder, step)
        digests: dict[str, FileDigest] = {}
        if scope.leads:
            for name in plan.senders.get(scope.leader, ()):
                digests[name] = self._manifests[plan.version].files[name].stored

        def check() -> None:
            for name, digest in digests.items():
                verify(path / name, digest)

        def add() -> None:
            for name, digest in digests.items():
                there.add(step, path / name, digest)

        def finish() -> None:
            if scope.leader == plan.finisher:
                there.finish(step, path)

        failure = f"cannot copy {path.name} to {there}, and nodes cannot read each other's disks"
        try:
            self._ranks.on_all(check, failure)  # before `begin` deletes the mirror's version of the step
        except DamagedError as error:
            unsteady.hold(error)
            self._print_line(f"WARNING: {error}; step {step} is not in {there}, so that the one before it is tried")
            return self._survey.passed_over(plan.version)
        # A failure from here on is no damage, and ends the start: a resume from an earlier step would abandon this one.
        self._ranks.on_leader(lambda: there.begin(step), failure)
        self._ranks.on_all(add, failure)
        scope.on_each(finish, failure)
        return self._survey.with_upload(plan.version)

    def _locate(self) -> Located:
        checkpoint = mirror.locate_checkpoint(self._request.resume)
        step_in_mirror = None
        if self._there is not None:
            step_in_mirror = mirror.step_in(self._there.store.root, checkpoint)
        return Located(checkpoint, mirror.step_in(self._folder, checkpoint), step_in_mirror)


def _put_aside(damaged: Mapping[int, DamagedError], rename: Callable[[int], str]) -> dict[int, str]:
    """Quarantine damaged checkpoints, but not unreadable ones; return the new name of each step, or none."""
    names = {}
    for step, error in damaged.items():
        unsteady.hold(error)
        names[step] = ""
        if not error.unread:
            names[step] = rename(step)
    return names


def _list_disk(folder: Path, *, is_mirrored: bool) -> LocationSurvey:
    """Checkpoints of a disk. A run without mirror reads the metadata of the one checkpoint that it loads."""
    places = {directory.step_of(path): path for path in directory.list_checkpoints(folder)}
    seals, damaged = dict.fromkeys(places, 0), dict[int, DamagedError]()
    if is_mirrored:
        seals, damaged = _read_seals(places)
    for path in directory.incomplete(folder):
        reason = "the file is gone, and a checkpoint without it is not complete"
        damaged[directory.step_of(path)] = DamagedError(path / directory.META, reason)
    names = {path.name: directory.step_of(path) for path in directory.quarantined(folder)}
    return LocationSurvey(seals, damaged, quarantined=names, remnants=tuple(directory.remnants(folder)))


def _list_mirror(there: mirror.Mirror) -> LocationSurvey:
    seals, damaged = _read_seals({step: there.place(step) for step in there.steps()})
    names = {address: directory.step_of(place_of(address)) for address in there.spoilt()}
    return LocationSurvey(seals, damaged, quarantined=names, remnants=tuple(there.remnants()))


def _read_seals(places: Mapping[int, Location]) -> tuple[dict[int, int], dict[int, DamagedError]]:
    """Checksum of the manifest of each checkpoint, and the damage of metadata."""
    seals, damaged = dict[int, int](), dict[int, DamagedError]()
    for step, folder in places.items():
        try:
            seals[step] = read_meta(folder).manifest_crc32
        except DamagedError as error:
            damaged[step] = error
    return seals, damaged
