"""Decision which checkpoint a run resumes from: a pure function from a survey of all locations to the next plan.

The survey grows while plans are carried out: manifests are read of one checkpoint at a time, the newest first. Reading
all of them would cost a restart minutes on a slow mirror. Each plan but `Refuse` and `ResumeStart` thus changes the
survey, by the methods of `ResumeSurvey`, and the function is asked again. All ranks hold the same survey, so their
plans are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nxtrain.checkpoint.directory import step_path
from nxtrain.checkpoint.resume_survey import Located, LocationSurvey, ResumeSurvey, Version
from nxtrain.checkpoint.rewinds import MIRROR, Rewind, RunHistory
from nxtrain.common.errors import DamagedError


@dataclass(frozen=True)
class ResumeRequest:
    """Request of a start.

    Args:
        resume: The value of `checkpoint.resume`.
        is_restart: An agent or a scheduler restarted the same command.
        job: The agent's or scheduler's name for the restarted job; empty if it has none.
        aims_at_mirror: The requested path is the mirror or one of its checkpoints.
    """

    resume: str
    is_restart: bool = False
    job: str = ""
    aims_at_mirror: bool = False


@dataclass(frozen=True)
class Refuse:
    """End of the start by an error."""

    error: str


@dataclass(frozen=True)
class Repeat:
    """Record of a repeated request, in the records that have at least `num_seen` rewinds."""

    history: RunHistory
    num_seen: int


@dataclass(frozen=True)
class Look:
    """List of the checkpoints of all locations."""

    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Abandon:
    """Abandonment of the checkpoints after a step.

    Args:
        after: The last step that stays, by location; all steps stay in other locations.
        damaged: Abandon quarantined checkpoints too.
    """

    after: Mapping[int, int]
    damaged: bool = True


@dataclass(frozen=True)
class Quarantine:
    """Quarantine of damaged checkpoints, by location and step; unreadable ones are passed over."""

    damaged: Mapping[int, Mapping[int, DamagedError]]


@dataclass(frozen=True)
class Inspect:
    """Read of the manifests of a version on all disks."""

    version: Version


@dataclass(frozen=True)
class PassOver:
    """Rejection of an incomplete version."""

    version: Version
    line: str


@dataclass(frozen=True)
class Upload:
    """Copy of a version to the mirror, since no node can read the disks of the others.

    Args:
        version: The version.
        senders: Files that each leader sends.
        finisher: The leader that completes the copy.
    """

    version: Version
    senders: Mapping[int, tuple[str, ...]]
    finisher: int


@dataclass(frozen=True)
class Locate:
    """Search for the requested checkpoint."""

    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResumeStart:
    """Start from a checkpoint, or from scratch.

    Args:
        own: The run resumes from its own newest checkpoint: damaged ones are quarantined.
        step: Step of the own checkpoint; None: the start is from scratch or from the located checkpoint.
        sources: Locations of the own checkpoint for each disk's ranks, by leader; the later ones are fallbacks.
        abandon: Checkpoints to abandon once the state is loaded.
        history: The record to write afterwards.
    """

    own: bool
    abandon: Abandon
    history: RunHistory
    step: int | None = None
    sources: Mapping[int, tuple[Literal["disk", "mirror"], ...]] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


Plan = Refuse | Repeat | Look | Abandon | Quarantine | Inspect | PassOver | Upload | Locate | ResumeStart


def plan_resume(survey: ResumeSurvey, request: ResumeRequest) -> Plan:
    """Plan the next action of a start, equal on all ranks."""
    records, resume = survey.records, request.resume
    conflict = records.conflict(survey.folder, survey.mirror, takes_over=request.aims_at_mirror)
    if conflict:
        return Refuse(conflict)
    newest = records.newest
    has_returned = newest.has_returned(resume, request.job)
    own = resume == "auto" or (request.is_restart and has_returned)
    if request.is_restart and not own and records.damaged:
        return Refuse(
            f"{records.damaged[0]}; it would tell whether the run went back as checkpoint.resume={resume} "
            "says, or is still to. Start it anew with the same to go back, or with checkpoint.resume=auto to go on "
            "from its newest checkpoint"
        )
    lines = tuple(f"WARNING: {error}; it is written anew" for error in records.damaged)
    if own:
        if survey.places is None:
            return Look(lines)
        # Only before the first upload, which a mirror that has missed a rewind receives in full.
        if not survey.holdings:
            abandon = _catch_up(survey)
            if abandon is not None:
                return abandon
        damaged = {where: location.damaged for where, location in survey.listed.items() if location.damaged}
        if damaged:
            return Quarantine(damaged)
        plan = _newest_own(survey, request)
        if plan is not None:
            return plan
        problem = _scratch_problem(survey, resume)
        if problem:
            return Refuse(problem)
        if resume == "auto":
            return ResumeStart(own=True, abandon=_everywhere(survey, 0), history=newest)
        lines = (f"nothing that the run reached since is left: it goes back to {resume} again",)
    elif has_returned:  # by an earlier start with the same request, which a restart must not take for this one's
        return Repeat(_with(newest, Rewind(told="", job=request.job)), num_seen=len(newest.returns))
    if resume == "never":
        return _rewind(survey, request, None, lines)
    if survey.located is None:
        return Locate(lines)
    return _rewind(survey, request, survey.located, ())


def _catch_up(survey: ResumeSurvey) -> Abandon | None:
    """Abandon the checkpoints of rewinds that a location has missed."""
    missed = {where: survey.records.missed(where) for where in survey.records.places}
    after = {where: last for where, last in missed.items() if last is not None and survey.listed[where].last > last}
    if not after:
        return None
    return Abandon(after)


def _newest_own(survey: ResumeSurvey, request: ResumeRequest) -> Inspect | PassOver | Upload | ResumeStart | None:
    """Plan for the newest version that may be complete; None: the run has none."""
    versions = set(survey.holdings)
    for location in survey.listed.values():
        versions.update(location.seals.items())
    candidates = [
        # If a step was written twice, the version on the disks is the later one.
        (step, survey.in_mirror.get(step) != seal, seal)
        for step, seal in versions - survey.rejected
        # With resume=never, a converted checkpoint of step 0 is not a start from scratch.
        if step not in survey.unread and (step > 0 or request.resume != "never")
    ]
    if not candidates:
        return None
    step, only_here, seal = max(candidates)
    if survey.uploaded is not None:
        # Another version of the step on another disk is no better than the uploaded one.
        step, seal = survey.uploaded
        only_here = False
    version = step, seal
    if survey.mirror and version not in survey.holdings:
        return Inspect(version)
    if survey.mirror and only_here:
        plan = _complete(survey, version)
        if plan is not None:
            return plan
    sources: dict[int, tuple[Literal["disk", "mirror"], ...]] = {}
    for leader in survey.listed.keys() - {MIRROR}:
        locations: list[Literal["disk", "mirror"]] = []
        if survey.listed[leader].seals.get(step) == seal:
            locations.append("disk")
        if survey.mirror and not only_here:
            locations.append("mirror")
        sources[leader] = tuple(locations)
    return ResumeStart(True, _everywhere(survey, step), survey.records.newest, step, sources)


def _complete(survey: ResumeSurvey, version: Version) -> PassOver | Upload | None:
    """Plan for a version that the mirror lacks; None: all ranks can read the disk that holds it."""
    holdings = sorted(survey.holdings[version].items())
    holders: dict[str, int] = {}  # the first leader that has the file
    wanted = set[str]()
    for leader, holding in holdings:
        wanted.update(holding.wanted)
        for name in holding.present:
            holders.setdefault(name, leader)
    sealers = [leader for leader, holding in holdings if holding.wanted]
    absent = sorted(wanted - holders.keys())
    if absent or not sealers:
        reason = "its manifest is damaged"
        if absent:
            reason = f"no disk holds its {absent[0]} whole"
        line = f"step {version[0]} is not in {survey.mirror}, and {reason}; the one before it is tried"
        return PassOver(version, line)
    if survey.is_shared:
        return None
    senders: dict[int, tuple[str, ...]] = {}
    for leader, holding in holdings:
        senders[leader] = tuple(name for name in holding.present if holders[name] == leader)
    return Upload(version, senders, sealers[0])


def _rewind(
    survey: ResumeSurvey, request: ResumeRequest, located: Located | None, lines: tuple[str, ...]
) -> ResumeStart:
    """Plan a start from scratch or from a requested checkpoint.

    A location that missed earlier rewinds keeps its checkpoints if the requested one is among them.
    """
    records = survey.records
    on_disk: int | None = None
    in_mirror: int | None = None
    keeps = 0
    if located is not None:
        on_disk, in_mirror = located.step_on_disk, located.step_in_mirror
        keeps = -1
        if on_disk is not None:
            keeps = on_disk
        elif in_mirror is not None:
            keeps = in_mirror
    after: dict[int, int] = {}
    for where in records.places:
        step_there = on_disk
        missed = records.missed(where)
        if where == MIRROR:
            step_there = in_mirror
        elif records.is_foreign:
            missed = -1
        after[where] = keeps
        if step_there is None and missed is not None:
            after[where] = min(keeps, missed)
    history = _with(records.newest, Rewind(told=request.resume, job=request.job, keeps=keeps))
    return ResumeStart(own=False, abandon=Abandon(after), history=history, lines=lines)


def _everywhere(survey: ResumeSurvey, last: int) -> Abandon:
    return Abandon(dict.fromkeys(survey.records.places, last), damaged=False)


def _scratch_problem(survey: ResumeSurvey, resume: str) -> str:
    """Error that keeps a run with damaged or lost checkpoints from a start from scratch; empty if there is none."""
    unread = set(survey.unread)
    on_disks = set[str]()
    remnants = set[str]()
    for where, location in survey.listed.items():
        unread.update(location.unread)
        remnants.update(location.remnants)
        if where != MIRROR:
            on_disks.update(location.quarantined)
    if unread:
        return (
            f"{named(sorted(unread))} of {survey.folder} cannot be read, and there is none before it. Start again when "
            "the storage is back, or use checkpoint.resume=PATH of another one, or never to start from scratch"
        )
    damaged = [*sorted(on_disks), *survey.listed.get(MIRROR, LocationSurvey()).quarantined]
    if damaged and resume in {"auto", "never"}:
        return (
            f"every checkpoint of {survey.folder} is damaged: {', '.join(damaged)}. Use "
            "checkpoint.resume=PATH of another one, or checkpoint.resume=never to start from scratch"
        )
    if remnants and resume == "auto":
        return (
            f"no complete checkpoint is left of those that {survey.folder} or its mirror held: "
            f"{', '.join(sorted(remnants))}. A start from scratch would write over the rest. Bring back what is gone, "
            "use another run.name or checkpoint.resume=PATH of a checkpoint, or checkpoint.resume=never to start from "
            "scratch here"
        )
    return ""


def named(steps: Iterable[int]) -> str:
    """Names of the checkpoints of steps."""
    return ", ".join(step_path(Path(), step).name for step in steps)


def _with(history: RunHistory, rewind: Rewind) -> RunHistory:
    return history.model_copy(update={"returns": (*history.returns, rewind)})
