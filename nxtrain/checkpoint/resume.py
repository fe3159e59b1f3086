"""Resume of a run: survey of its checkpoints, decision, and execution of the decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.load import open_checkpoint
from nxtrain.checkpoint.mirror import Mirror, Mirrored
from nxtrain.checkpoint.resume_decision import Resume, Upload, decide
from nxtrain.checkpoint.resume_survey import LOOKING, ResumeRequest, Version, take_survey
from nxtrain.checkpoint.rewinds import Rewind, read_records, write_records
from nxtrain.checkpoint.run_locations import MIRROR, RunLocations
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import DamagedError
from nxtrain.common.io.checksummed_file import FileDigest, verify
from nxtrain.common.io.object_store import Location
from nxtrain.common.io.read_retry import retry_budget
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.config.schema import RunConfig


class ResumePlanner:
    """Planner that finds the checkpoint to resume from, quarantines damage, and abandons checkpoints in a rewind.

    Every rank creates one planner, and makes the same calls.

    Args:
        config: Configuration of the run.
        mirrored: Mirror of the run; None without a mirror.
        ranks: All ranks of the run.
        print_line: Function that prints a log line.
        restarted: The job restarts the same command on this rank.
        job: Name of the scheduler's or agent's job.
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
        folder = config.run.dir / CHECKPOINTS_DIR
        if mirrored is None:
            self._locations = RunLocations(folder, None, StorageScope(ranks))
        else:
            self._locations = RunLocations(folder, mirrored.mirror, replace(mirrored.scope, ranks=ranks))
        self._ranks = ranks
        self._print_line = print_line
        self._printed = set[str]()
        # One restarted rank is enough, since a replacement agent has had no earlier start.
        answers = ranks.gather((restarted, job))
        is_restart = any(is_restarted for is_restarted, _ in answers)
        self._request = ResumeRequest(config.checkpoint.resume, is_restart, job=answers[0][1])
        self._records = read_records(self._locations)
        self._unread = frozenset[tuple[int, int]]()
        self._rejected = frozenset[Version]()
        self._resume = Resume()

    @property
    def is_own(self) -> bool:
        """True if the run resumes from its own newest checkpoint; damaged checkpoints are then quarantined.

        False if the run starts from another run's checkpoint, or rewinds.
        """
        return self._resume.is_own

    def rewind(self, last: int) -> None:
        """Abandon the checkpoints after a step in all locations, and record the rewind. Call this before `choose`.

        The record repeats the last request, so a restart does not carry out that request again.

        Args:
            last: Last step that remains part of the run.
        """
        records = self._records
        if records.conflict(self._locations.folder, self._locations.root, takes_over=False):
            return  # `choose` refuses
        after = dict.fromkeys(records.locations, last)
        self._abandon(after, f"the run goes back to step {last} or before", damaged=True)
        request = Rewind(told="")
        if records.newest.returns:
            request = records.newest.returns[-1]
        record = records.newest.with_rewind(request.model_copy(update={"keeps": last}))
        self._records = write_records(records, record, self._locations)

    def choose(self) -> tuple[Location, ...]:
        """Choose the checkpoint to resume from; return its location, then its fallbacks; empty to start from scratch.

        Raises:
            CheckpointError: There is no usable checkpoint, or the locations belong to different runs.
        """
        while True:
            survey = take_survey(self._locations, self._records, self._request, self._unread, self._rejected)
            self._resume = decide(survey, self._request)
            if self._prepare(self._resume):
                return self._sources

    def quarantine(self, error: DamagedError) -> str:
        """Quarantine the chosen checkpoint after damage was found; return a log message.

        A checkpoint that cannot be read is skipped without a quarantine, and the previous checkpoint is tried.
        """
        path, there = self._sources[0], self._locations.mirror
        step, failure = directory.step_of(path), f"cannot put aside {path.name}"
        if self._ranks.on_leader(lambda: error.unread, failure):
            self._unread |= {(where, step) for where in self._records.locations}
            return "the one before it is tried"

        def in_mirror(there: Mirror) -> str:
            if step not in there.steps():
                return ""
            return there.quarantine(step)

        def on_disk() -> str:
            local = directory.step_path(self._locations.folder, step)
            if not directory.is_checkpoint(local):
                return ""
            return directory.quarantine(local).name

        names = self._locations.act(on_disk, in_mirror, failure)
        if there is None:
            return f"the checkpoint is put aside as {names[0]}, and the one before it is tried"
        return f"step {step} is put aside on disks and in {there}, and the one before it is tried"

    def begin(self) -> None:
        """Finish the resume once the chosen checkpoint is loaded: abandon later checkpoints, then record the rewind.

        The record is written last, so a restart after an interruption rewinds again.
        """
        resume = self._resume
        assert resume.record is not None, "a checkpoint, or a start from scratch, was chosen"
        origin = "scratch"
        if self._sources:
            origin = str(self._sources[0])
        self._abandon(resume.abandon, f"the run goes on from {origin}", damaged=not resume.is_own)
        self._records = write_records(self._records, resume.record, self._locations)

    @property
    def _sources(self) -> tuple[Location, ...]:
        return self._resume.sources.get(self._locations.scope.leader, ())

    def _prepare(self, resume: Resume) -> bool:
        """Execute the part of a decision that precedes the load; return False if another survey must follow."""
        for line in resume.lines:
            if line not in self._printed:
                self._print_line(line)
        self._printed.update(resume.lines)
        if resume.error is not None:
            raise resume.error
        if resume.catch_up:
            self._abandon(resume.catch_up, "the run went back where this was not seen", damaged=True)
            newest = self._records.newest
            self._records = write_records(self._records, newest, self._locations, only=resume.catch_up.keys())
            return False
        if resume.quarantine:
            self._quarantine(resume.quarantine)
            return False
        if resume.repeated is not None:
            # Records of locations that missed a rewind must keep the information that they missed it.
            current = self._records.up_to_date
            self._records = write_records(self._records, resume.repeated, self._locations, only=current)
        return resume.upload is None or self._upload(resume.upload)

    def _abandon(self, after: Mapping[int, int], why: str, *, damaged: bool) -> None:
        steps = self._locations.abandon(after, damaged=damaged)
        if steps:
            names = directory.step_names(steps)
            self._print_line(f"{why}: put aside as abandoned, since no part of it any more: {names}")

    def _quarantine(self, damaged: Mapping[int, Mapping[int, DamagedError]]) -> None:
        """Quarantine damaged checkpoints, and skip checkpoints that cannot be read."""

        def hold(where: int) -> None:
            for error in damaged.get(where, {}).values():
                retry_budget.hold(error)

        self._locations.act(lambda: hold(self._locations.scope.leader), lambda _: hold(MIRROR), LOOKING)
        steps: dict[int, list[int]] = {}
        for where, errors in damaged.items():
            steps[where] = [step for step, error in errors.items() if not error.unread]
        names = self._locations.quarantine(steps, LOOKING)
        for where in sorted(damaged, key=lambda where: (where == MIRROR, where)):
            for step, error in damaged[where].items():
                effect = "it is passed over"
                if error.unread:
                    self._unread |= {(where, step)}
                elif where == MIRROR:
                    effect = f"{names[where][step]} is put aside"
                else:
                    effect = f"it is put aside as {names[where][step]}"
                self._print_line(f"{error}; {effect}")

    def _upload(self, upload: Upload) -> bool:
        """Copy a checkpoint to the mirror; return False if one of its files is damaged."""
        mirror, scope = self._locations.mirror, self._locations.scope
        step = upload.version[0]
        assert mirror is not None
        path = directory.step_path(self._locations.folder, step)
        digests: dict[str, FileDigest] = {}

        def check() -> None:
            if scope.leads and scope.leader in upload.senders:
                _, manifest = open_checkpoint(path)
                for name in upload.senders[scope.leader]:
                    digests[name] = manifest.files[name]
                    verify(path / name, digests[name])

        def add() -> None:
            for name, digest in digests.items():
                mirror.add(step, path / name, digest)

        def finish() -> None:
            if scope.leader == upload.finisher:
                mirror.finish(step, path)

        failure = f"cannot copy {path.name} to {mirror}, and nodes cannot read each other's disks"
        try:
            self._ranks.on_all(check, failure)  # before `begin` deletes the mirror's version of the step
        except DamagedError as error:
            retry_budget.hold(error)
            self._print_line(f"WARNING: {error}; step {step} is not in {mirror}, so that the one before it is tried")
            self._rejected |= {upload.version}
            return False
        # A later failure is not damage, and ends the start, since resuming from an earlier step would abandon this one.
        self._ranks.on_leader(lambda: mirror.begin(step), failure)
        self._ranks.on_all(add, failure)
        scope.on_each(finish, failure)
        return True
