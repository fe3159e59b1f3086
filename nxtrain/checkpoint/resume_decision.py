"""Decision about the checkpoint from which a run resumes: a pure function of the survey of all locations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nxtrain.checkpoint.directory import step_names, step_path
from nxtrain.checkpoint.resume_survey import ResumeRequest, ResumeSurvey, Version
from nxtrain.checkpoint.rewinds import Rewind, RunHistory
from nxtrain.checkpoint.run_locations import MIRROR
from nxtrain.common.errors import CheckpointError, DamagedError, NxtrainError
from nxtrain.common.io.object_store import Location


@dataclass(frozen=True)
class Upload:
    """Upload of a checkpoint version to the mirror, needed if nodes cannot read each other's disks.

    Args:
        version: Step and manifest checksum of the checkpoint.
        senders: Names of the files that each disk's leader uploads.
        finisher: Leader that uploads the manifest and `meta.json`.
    """

    version: Version
    senders: Mapping[int, tuple[str, ...]]
    finisher: int


@dataclass(frozen=True)
class Resume:
    """Decision about the resume of a run, with the fields in the order of execution.

    Args:
        lines: Log lines to print.
        error: Error with which the start fails; None if the start continues.
        catch_up: Last step to keep, by location that missed a rewind; another survey follows.
        quarantine: Damaged checkpoints by location and step; another survey follows.
        repeated: Record of a repeated rewind request, for the locations that recorded all rewinds.
        upload: Upload to the mirror before the load; None if none is needed.
        sources: Locations of the checkpoint for the ranks of each disk, by leader; the first is read, and others are
            fallbacks. Empty if the run starts from scratch.
        is_own: The run resumes from its own newest checkpoint; damaged checkpoints are quarantined.
        abandon: Last step to keep, by location, once the state is loaded.
        record: Record to write to all locations after the load.
    """

    lines: tuple[str, ...] = ()
    error: NxtrainError | None = None
    catch_up: Mapping[int, int] = field(default_factory=dict)
    quarantine: Mapping[int, Mapping[int, DamagedError]] = field(default_factory=dict)
    repeated: RunHistory | None = None
    upload: Upload | None = None
    sources: Mapping[int, tuple[Location, ...]] = field(default_factory=dict)
    is_own: bool = False
    abandon: Mapping[int, int] = field(default_factory=dict)
    record: RunHistory | None = None


def decide(survey: ResumeSurvey, request: ResumeRequest) -> Resume:
    """Decide from which checkpoint a run resumes; all ranks make the same decision."""
    records = survey.records
    goes_on = request.goes_on(records.newest)
    if isinstance(survey.requested, NxtrainError) and not goes_on:
        return Resume(error=survey.requested)
    conflict = records.conflict(survey.folder, survey.mirror, takes_over=survey.step_in_mirror is not None)
    if conflict:
        return Resume(error=CheckpointError(conflict))
    lines = tuple(f"WARNING: {error}; it is written anew" for error in records.damaged)
    if goes_on:
        return _resume(survey, request, lines)
    if request.is_restart and records.damaged:
        return Resume(
            error=CheckpointError(
                f"{records.damaged[0]}; the file records if the rewind to checkpoint.resume={request.resume} is done. "
                f"Start the run as a new job with checkpoint.resume={request.resume} to rewind again, or with "
                "checkpoint.resume=auto to continue from its newest checkpoint"
            )
        )
    return _rewind(survey, request, lines)


def _resume(survey: ResumeSurvey, request: ResumeRequest, lines: tuple[str, ...]) -> Resume:
    """Decide to resume from the newest complete checkpoint of the run itself."""
    records = survey.records
    catch_up: dict[int, int] = {}
    for where, location in survey.locations.items():
        missed = records.missed(where)
        if missed is not None and location.last > missed:
            catch_up[where] = missed
    if catch_up:
        return Resume(lines, catch_up=catch_up)
    if survey.damaged:
        return Resume(lines, quarantine=survey.damaged)
    for version in survey.versions(request):
        problem = ""
        if survey.mirror is not None:
            problem = survey.problem_of(version)
        if not problem:
            return _from_version(survey, version, lines)
        name = f"step {version[0]}"
        lines += (f"{name} is not in {survey.mirror}, and {problem}; the one before it is tried",)
    problem = _scratch_problem(survey, request.resume)
    if problem:
        return Resume(lines, error=CheckpointError(problem))
    if request.resume == "auto":
        return Resume(lines, is_own=True, abandon=dict.fromkeys(records.locations, 0), record=records.newest)
    lines += (f"no checkpoint since the rewind is left: the run rewinds to {request.resume} again",)
    if isinstance(survey.requested, NxtrainError):
        return Resume(lines, error=survey.requested)
    return _rewind(survey, request, lines)


def _from_version(survey: ResumeSurvey, version: Version, lines: tuple[str, ...]) -> Resume:
    """Decide to resume from a complete version, with an upload to the mirror if nodes have separate disks."""
    step, seal = version
    upload = None
    is_mirrored = survey.is_mirrored(version)
    if survey.mirror is not None and not is_mirrored and not survey.is_shared:
        upload = _upload(survey, version)
        is_mirrored = True
    sources: dict[int, tuple[Location, ...]] = {}
    for leader in survey.locations.keys() - {MIRROR}:
        sources[leader] = ()
        if survey.locations[leader].seals.get(step) == seal:
            sources[leader] += (step_path(survey.folder, step),)
        if survey.mirror is not None and is_mirrored:
            sources[leader] += (survey.mirror / step_path(survey.folder, step).name,)
    return Resume(
        lines,
        upload=upload,
        sources=sources,
        is_own=True,
        abandon=dict.fromkeys(survey.records.locations, step),
        record=survey.records.newest,
    )


def _upload(survey: ResumeSurvey, version: Version) -> Upload:
    """Plan the upload of a version to the mirror: the first disk that has a file uploads the file."""
    senders: dict[int, tuple[str, ...]] = {}
    sent = set[str]()
    for leader, files in sorted(survey.files[version].items()):
        senders[leader] = tuple(name for name, is_whole in files.items() if is_whole and name not in sent)
        sent.update(senders[leader])
    return Upload(version, senders, finisher=min(senders))


def _rewind(survey: ResumeSurvey, request: ResumeRequest, lines: tuple[str, ...]) -> Resume:
    """Decide to rewind: start from scratch, or from the requested checkpoint.

    A location that missed earlier rewinds keeps its checkpoints if it contains the requested checkpoint.
    """
    records, requested = survey.records, survey.requested
    on_disk, in_mirror = survey.step_on_disk, survey.step_in_mirror
    sources: dict[int, tuple[Location, ...]] = {}
    keeps = 0
    if requested is not None:
        assert not isinstance(requested, NxtrainError)
        sources = dict.fromkeys(records.locations, (requested,))
        keeps = -1
        if on_disk is not None:
            keeps = on_disk
        elif in_mirror is not None:
            keeps = in_mirror
    after: dict[int, int] = {}
    for where in records.locations:
        step_there = on_disk
        missed = records.missed(where)
        if where == MIRROR:
            step_there = in_mirror
        elif records.is_foreign:
            missed = -1
        after[where] = keeps
        if step_there is None and missed is not None:
            after[where] = min(keeps, missed)
    history = records.newest
    repeated = None
    # A restart must distinguish this start from an earlier start with the same request.
    if not request.goes_on(history) and history.has_rewound(request.resume, request.job):
        repeated = history.with_rewind(Rewind(told="", job=request.job))
        history = repeated
    record = history.with_rewind(Rewind(told=request.resume, job=request.job, keeps=keeps))
    return Resume(lines, repeated=repeated, sources=sources, abandon=after, record=record)


def _scratch_problem(survey: ResumeSurvey, resume: str) -> str:
    """Error message against a start from scratch of a run with damaged or lost checkpoints; empty if none were lost."""
    unread = set[int]()
    on_disks = set[str]()
    in_mirror: list[str] = []
    remnants = set[str]()
    for where, location in survey.locations.items():
        unread.update(location.unread)
        remnants.update(location.remnants)
        if where == MIRROR:
            in_mirror += location.quarantined
        else:
            on_disks.update(location.quarantined)
    damaged = [*sorted(on_disks), *in_mirror]
    if unread:
        return (
            f"{step_names(sorted(unread))} of {survey.folder} cannot be read, and there is none before it. Start again "
            "once the storage works, or use checkpoint.resume=PATH of another checkpoint, or "
            "checkpoint.resume=never to start from scratch"
        )
    if damaged and resume in {"auto", "never"}:
        return (
            f"every checkpoint of {survey.folder} is damaged: {', '.join(damaged)}. Use "
            "checkpoint.resume=PATH of another checkpoint, or checkpoint.resume=never to start from scratch"
        )
    if remnants and resume == "auto":
        return (
            f"{survey.folder} or its mirror had checkpoints, but no complete checkpoint is left: "
            f"{', '.join(sorted(remnants))}. A start from scratch would overwrite the rest. Restore the missing files, "
            "use another run.name or checkpoint.resume=PATH of a checkpoint, or checkpoint.resume=never to start from "
            "scratch here"
        )
    return ""
