"""Decision which checkpoint a run resumes from, with a row per case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nxtrain.checkpoint.directory import step_path
from nxtrain.checkpoint.resume_decision import Resume, Upload, decide
from nxtrain.checkpoint.resume_survey import LocationSurvey, ResumeRequest, ResumeSurvey, Version
from nxtrain.checkpoint.rewinds import Record, Records, Rewind, RunHistory
from nxtrain.checkpoint.run_locations import MIRROR
from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.io.object_store import Location

FILES = ("a", "b")
FRESH = RunHistory(run="fresh", run_dir="/run")
RUN, AWAY, OTHER = Path("/run"), Path("/mirror"), Path("/other/step-00000003")


def on_disk(step: int) -> Path:
    return step_path(RUN, step)


def in_mirror(step: int) -> Path:
    return step_path(AWAY, step)


def went_back(*rewinds: Rewind) -> RunHistory:
    return FRESH.model_copy(update={"returns": rewinds})


BACK_TO_1 = went_back(Rewind(told="/a", keeps=1))
TO_SCRATCH = went_back(Rewind(told="never", keeps=0))
DAMAGED = DamagedError("file", "its reason")
UNREAD = DamagedError("file", "its reason", unread=True)
AUTO = ResumeRequest("auto")
LISTED: dict[int, LocationSurvey] = {0: LocationSurvey({4: 1}), 1: LocationSurvey({4: 1})}
"""Step 4 on two disks."""
NO_REMNANT = LocationSurvey()


def surveyed(
    locations: Mapping[int, LocationSurvey] | None = None,
    *,
    history: RunHistory = FRESH,
    records: Mapping[int, Record] | None = None,
    files: Mapping[Version, Mapping[int, tuple[str, ...]]] | None = None,
    is_shared: bool = False,
    **more: Any,
) -> ResumeSurvey:
    """Survey of a run with a mirror; `files` are those that are whole on each disk that has the version."""
    locations = locations or {0: NO_REMNANT, MIRROR: NO_REMNANT}
    read = {
        version: {leader: {name: name in whole for name in FILES} for leader, whole in disks.items()}
        for version, disks in (files or {}).items()
    }
    kept = Records(records or dict.fromkeys(locations, history), FRESH)
    return ResumeSurvey(RUN, AWAY, kept, is_shared, locations, read, **more)


def resumed(step: int, sources: Mapping[int, tuple[Location, ...]], history: RunHistory = FRESH, **more: Any) -> Resume:
    """Resume from a step of the run's own, which also is in the mirror or is copied there."""
    return Resume(sources=sources, is_own=True, abandon=dict.fromkeys((*sources, MIRROR), step), record=history, **more)


CASES: dict[str, tuple[ResumeSurvey, ResumeRequest, Resume]] = {
    "the newest checkpoint is taken from the disk, with the mirror for what is damaged": (
        surveyed({**LISTED, MIRROR: LocationSurvey({2: 1, 4: 1})}, files={(4, 1): {0: FILES, 1: FILES}}),
        AUTO,
        resumed(4, {0: (on_disk(4), in_mirror(4)), 1: (on_disk(4), in_mirror(4))}),
    ),
    "each disk sends its files to a mirror that lacks them": (
        surveyed({**LISTED, MIRROR: LocationSurvey({2: 1})}, files={(4, 1): {0: ("a",), 1: FILES}}),
        AUTO,
        resumed(
            4,
            {0: (on_disk(4), in_mirror(4)), 1: (on_disk(4), in_mirror(4))},
            upload=Upload((4, 1), {0: ("a",), 1: ("b",)}, finisher=0),
        ),
    ),
    "a folder that all share is read without the mirror": (
        surveyed({0: LISTED[0], MIRROR: NO_REMNANT}, files={(4, 1): {0: FILES}}, is_shared=True),
        AUTO,
        resumed(4, {0: (on_disk(4),)}),
    ),
    "an incomplete version is passed over": (
        surveyed(
            {0: LocationSurvey({2: 1, 4: 1}), MIRROR: LocationSurvey({2: 1})},
            files={(4, 1): {0: ("a",)}, (2, 1): {0: FILES}},
        ),
        AUTO,
        resumed(
            2,
            {0: (on_disk(2), in_mirror(2))},
            lines=("step 4 is not in /mirror, and no disk holds its b whole; the one before it is tried",),
        ),
    ),
    "a mirror that missed a rewind gives up what is later, damaged or not": (
        surveyed({0: NO_REMNANT, MIRROR: LocationSurvey(quarantined={"x": 3})}, records={0: BACK_TO_1, MIRROR: FRESH}),
        AUTO,
        Resume(catch_up={MIRROR: 1}),
    ),
    "a damaged record is written anew": (
        surveyed({0: LISTED[0], MIRROR: LISTED[0]}, records={0: DAMAGED, MIRROR: FRESH}, files={(4, 1): {0: FILES}}),
        AUTO,
        resumed(4, {0: (on_disk(4), in_mirror(4))}, lines=(f"WARNING: {DAMAGED}; it is written anew",)),
    ),
    "a requested start from scratch writes a damaged record anew": (
        surveyed(records={0: DAMAGED, MIRROR: FRESH}),
        ResumeRequest("never"),
        Resume(
            lines=(f"WARNING: {DAMAGED}; it is written anew",),
            abandon={0: 0, MIRROR: 0},
            record=went_back(Rewind(told="never", keeps=0)),
        ),
    ),
    "a request that is repeated by hand rewinds again": (
        surveyed(history=TO_SCRATCH),
        ResumeRequest("never"),
        Resume(
            repeated=went_back(*TO_SCRATCH.returns, Rewind(told="")),
            abandon={0: 0, MIRROR: 0},
            record=went_back(*TO_SCRATCH.returns, Rewind(told=""), Rewind(told="never", keeps=0)),
        ),
    ),
    "a mirror of another run that is asked for": (
        surveyed(
            records={0: FRESH.model_copy(update={"run": "one"}), MIRROR: FRESH.model_copy(update={"run": "two"})},
            requested=in_mirror(3),
            step_in_mirror=3,
        ),
        ResumeRequest("/mirror"),
        Resume(
            sources={0: (in_mirror(3),), MIRROR: (in_mirror(3),)},
            abandon={0: -1, MIRROR: 3},
            record=went_back(Rewind(told="/mirror", keeps=3)),
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_decision(case: str) -> None:
    survey, request, expected = CASES[case]
    assert decide(survey, request) == expected


REFUSALS: dict[str, tuple[ResumeSurvey, ResumeRequest, str]] = {
    "a requested path without a checkpoint": (
        surveyed(requested=CheckpointError("holds no complete checkpoint")),
        ResumeRequest("/typo"),
        "holds no complete checkpoint",
    ),
    "a path that is needed again": (
        surveyed(history=went_back(Rewind(told="/gone")), requested=CheckpointError("holds no complete checkpoint")),
        ResumeRequest("/gone", is_restart=True),
        "holds no complete checkpoint",
    ),
    "a mirror of another run of this folder": (
        surveyed(records={0: FRESH.model_copy(update={"run": "one"}), MIRROR: FRESH}),
        AUTO,
        "belongs to another run: it mirrors an earlier run of run.dir=/run",
    ),
    "a mirror of another folder's run": (
        surveyed(records={0: None, MIRROR: RunHistory(run="two", run_dir="/elsewhere")}),
        ResumeRequest("/a"),
        "belongs to another run: it mirrors run.dir=/elsewhere",
    ),
    "disks of different runs": (
        surveyed(records={0: FRESH, 1: FRESH.model_copy(update={"run": "two"})}),
        AUTO,
        "different runs on different nodes",
    ),
    "a restart that cannot tell whether it went back": (
        surveyed(records={0: DAMAGED, MIRROR: DAMAGED}),
        ResumeRequest("never", is_restart=True),
        "the file records if the rewind",
    ),
    "only unread checkpoints": (
        surveyed({0: LocationSurvey(unread=frozenset({4})), MIRROR: NO_REMNANT}),
        AUTO,
        "step-00000004 of /run cannot be read",
    ),
    "only quarantined checkpoints": (
        surveyed({0: LocationSurvey(quarantined={"b": 2}), MIRROR: LocationSurvey(quarantined={"a": 2})}),
        AUTO,
        "every checkpoint of /run is damaged: b, a. ",
    ),
    "only quarantined checkpoints since a rewind": (
        surveyed({0: LocationSurvey(quarantined={"b": 2}), MIRROR: NO_REMNANT}, history=TO_SCRATCH),
        ResumeRequest("never", is_restart=True),
        "every checkpoint of /run is damaged: b. ",
    ),
    "remnants on a disk": (
        surveyed({0: LocationSurvey(remnants=("latest",)), MIRROR: NO_REMNANT}),
        AUTO,
        "is left: latest. ",
    ),
    "remnants in the mirror": (
        surveyed({0: NO_REMNANT, MIRROR: LocationSurvey(remnants=("latest",))}),
        AUTO,
        "is left: latest. ",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case: str) -> None:
    survey, request, problem = REFUSALS[case]
    decision = decide(survey, request)
    assert problem in str(decision.error)
    assert replace(decision, error=None, lines=()) == Resume()


def test_remnants_keep_no_rewind_from_scratch() -> None:
    survey = surveyed({0: LocationSurvey(remnants=("latest",)), MIRROR: NO_REMNANT}, history=TO_SCRATCH)
    assert decide(survey, ResumeRequest("never", is_restart=True)).error is None
    whole = surveyed({0: LocationSurvey({3: 1}, remnants=("latest",)), MIRROR: LocationSurvey({3: 1})})
    assert decide(whole, AUTO).is_own


@pytest.mark.parametrize(("disk", "mirror", "keeps"), [(3, None, 3), (None, 2, 2), (3, 2, 3), (None, None, -1)])
def test_a_requested_checkpoint_of_the_run_stays(disk: int | None, mirror: int | None, keeps: int) -> None:
    """A location that missed a rewind to step 1 keeps its later checkpoints if the requested one is among them."""
    survey = surveyed(
        records={0: BACK_TO_1, 1: FRESH, MIRROR: FRESH}, requested=OTHER, step_on_disk=disk, step_in_mirror=mirror
    )
    decision = decide(survey, ResumeRequest("/a"))
    assert decision.record is not None
    assert decision.record.returns[-1].keeps == keeps
    after = {0: keeps}
    for where, step in ((1, disk), (MIRROR, mirror)):
        after[where] = keeps if step is not None else min(keeps, 1)
    assert decision.abandon == after
