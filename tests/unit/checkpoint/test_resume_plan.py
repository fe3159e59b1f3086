"""Rules of the choice of a checkpoint, over drawn contents of disks, mirror and rewind records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nxtrain.checkpoint.resume_plan import (
    Abandon,
    Inspect,
    Locate,
    Look,
    PassOver,
    Plan,
    Quarantine,
    Refuse,
    Repeat,
    ResumeRequest,
    ResumeStart,
    Upload,
    plan_resume,
)
from nxtrain.checkpoint.resume_survey import Holding, Located, LocationSurvey, ResumeSurvey, Version
from nxtrain.checkpoint.rewinds import MIRROR, Record, Records, Rewind, RunHistory
from nxtrain.common.errors import DamagedError

K = TypeVar("K")
V = TypeVar("V")

FILES = ("a", "b")
State = Literal["whole", "damaged", "unread"]
FRESH = RunHistory(run="fresh", run_dir="/run")


@dataclass(frozen=True)
class Stored:
    """True state of one checkpoint on one disk or in the mirror."""

    seal: int
    metadata: State = "whole"
    manifest: State = "whole"
    present: tuple[str, ...] = FILES


@dataclass(frozen=True)
class Locations:
    """True content of all locations.

    Args:
        disks: Checkpoints by leader and step.
        mirror: Checkpoints of the mirror; None: there is none.
        quarantined: Names of quarantined checkpoints, by location.
        records: Rewinds of the run.
        spoilt: Versions whose files differ from what was written.
        is_shared: All ranks see one folder.
    """

    disks: Mapping[int, Mapping[int, Stored]]
    mirror: Mapping[int, Stored] | None
    quarantined: Mapping[int, Mapping[str, int]]
    records: Records
    spoilt: frozenset[Version]
    is_shared: bool

    @property
    def survey(self) -> ResumeSurvey:
        return ResumeSurvey(Path("/run"), "/mirror" if self.mirror is not None else "", self.records, self.is_shared)


def held(stored: Mapping[int, Stored], quarantined: Mapping[str, int], *, is_mirrored: bool) -> LocationSurvey:
    if not is_mirrored:
        return LocationSurvey(dict.fromkeys(stored, 0), quarantined=quarantined)
    seals = {step: each.seal for step, each in stored.items() if each.metadata == "whole"}
    damaged = {step: error(each.metadata) for step, each in stored.items() if each.metadata != "whole"}
    return LocationSurvey(seals, damaged, quarantined=quarantined)


def error(state: State) -> DamagedError:
    return DamagedError("file", "its reason", unread=state == "unread")


def inspected(stored: Stored | None, version: Version) -> Holding | DamagedError:
    if stored is None or stored.metadata != "whole" or stored.seal != version[1]:
        return Holding()
    return Holding(FILES, stored.present) if stored.manifest == "whole" else error(stored.manifest)


def names(damaged: Mapping[int, DamagedError], where: object) -> dict[int, str]:
    return {step: "" if each.unread else f"step-{step:08d}.corrupt@{where}" for step, each in damaged.items()}


def carry_out(world: Locations, survey: ResumeSurvey, plan: Plan) -> ResumeSurvey:
    """Survey after a plan is carried out on the drawn locations."""
    if isinstance(plan, Look):
        mirrored = world.mirror is not None
        places = world.disks if world.mirror is None else {**world.disks, MIRROR: world.mirror}
        listed = {n: held(each, world.quarantined[n], is_mirrored=mirrored) for n, each in places.items()}
        return replace(survey, places=listed)
    if isinstance(plan, Abandon):
        return survey.abandoned(plan.after, damaged=plan.damaged)
    if isinstance(plan, Quarantine):
        return survey.quarantined({n: names(each, n) for n, each in plan.damaged.items()})
    if isinstance(plan, Inspect):
        step = plan.version[0]
        there = {n: each.get(step) if step in survey.listed[n].seals else None for n, each in world.disks.items()}
        return survey.inspected(plan.version, {n: inspected(each, plan.version) for n, each in there.items()})
    if isinstance(plan, PassOver):
        return survey.passed_over(plan.version)
    if isinstance(plan, Upload):
        assert sorted(name for sent in plan.senders.values() for name in sent) == sorted(FILES), "each file once"
        assert world.disks[plan.finisher][plan.version[0]].manifest == "whole"
        return survey.passed_over(plan.version) if plan.version in world.spoilt else survey.with_upload(plan.version)
    if isinstance(plan, Repeat):
        records = survey.records

        def due(each: Record) -> Record:
            return plan.history if isinstance(each, RunHistory) and len(each.returns) >= plan.num_seen else each

        return replace(survey, records=replace(records, places={n: due(each) for n, each in records.places.items()}))
    assert isinstance(plan, Locate)
    return replace(survey, located=Located(Path("/other/step-00000003")))


def reversed_order(survey: ResumeSurvey) -> ResumeSurvey:
    """The same survey, put together in another order, as by another rank."""

    def back(found: LocationSurvey) -> LocationSurvey:
        return replace(found, seals=turned(found.seals), damaged=turned(found.damaged))

    records = replace(survey.records, places=turned(survey.records.places))
    places = None if survey.places is None else {n: back(each) for n, each in turned(survey.places).items()}
    holdings = {version: turned(each) for version, each in turned(survey.holdings).items()}
    return replace(survey, records=records, places=places, holdings=holdings)


def turned(mapping: Mapping[K, V]) -> dict[K, V]:
    return dict(reversed([*mapping.items()]))


def decide(
    world: Locations, request: ResumeRequest, survey: ResumeSurvey | None = None
) -> tuple[ResumeSurvey, ResumeStart | Refuse, list[Plan]]:
    """The end of a start, and all plans before it; every plan is the same on every rank."""
    survey, plans = survey or world.survey, list[Plan]()
    for _ in range(60):
        plan = plan_resume(survey, request)
        assert plan_resume(reversed_order(survey), request) == plan
        plans.append(plan)
        if isinstance(plan, ResumeStart | Refuse):
            return survey, plan, plans
        survey = carry_out(world, survey, plan)
    raise AssertionError(f"no end: {plans[-4:]}")


STEPS = st.integers(0, 4)
STATES: st.SearchStrategy[State] = st.sampled_from(["whole", "whole", "whole", "damaged", "unread"])
STORED = st.builds(Stored, st.integers(1, 2), STATES, STATES, st.sampled_from([FILES, FILES, ("a",), ("b",), ()]))
REWINDS = st.lists(st.builds(Rewind, told=st.just("never"), keeps=st.none() | st.integers(-1, 4)), max_size=2)


@st.composite
def worlds(draw: st.DrawFn) -> Locations:
    leaders = range(draw(st.integers(1, 3)))
    mirrored = len(leaders) > 1 or draw(st.booleans())
    returns = tuple(draw(REWINDS))

    def record() -> Record:
        if draw(st.integers(0, 9)) == 0:
            return DamagedError("lineage.json", "its content is not what was written")
        known = draw(st.integers(-1, len(returns)))
        return None if known < 0 else RunHistory(run="one", run_dir="/run", returns=returns[:known])

    def aside(where: int) -> dict[str, int]:
        return {f"step-{step:08d}.corrupt@{where}": step for step in draw(st.sets(STEPS, max_size=1))}

    whole = RunHistory(run="one", run_dir="/run", returns=returns)
    places = {leader: record() for leader in leaders} | ({MIRROR: whole} if mirrored else {})
    if draw(st.booleans()):
        places |= {leaders[-1]: whole} | ({MIRROR: record()} if mirrored else {})
    return Locations(
        {leader: draw(st.dictionaries(STEPS, STORED, max_size=3)) for leader in leaders},
        draw(st.dictionaries(STEPS, STORED, max_size=3)) if mirrored else None,
        {where: aside(where) if draw(st.booleans()) else {} for where in (MIRROR, *leaders)},
        Records(places, FRESH),
        frozenset(draw(st.sets(st.tuples(STEPS, st.integers(1, 2)), max_size=2))),
        is_shared=len(leaders) == 1,
    )


REQUESTS = st.builds(
    ResumeRequest, st.sampled_from(["auto", "auto", "never", "/other"]), st.booleans(), st.sampled_from(["", "7"])
)
drawn = settings(max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])


def stays(world: Locations, where: int) -> int:
    """Last step of a location that no missed rewind abandoned."""
    missed = world.records.missed(where)
    return 99 if missed is None else missed


def expected(world: Locations, request: ResumeRequest, unread: frozenset[int] = frozenset()) -> Version | None:
    """The newest complete version, by looking at everything at once."""
    copies = {
        step: each.seal
        for step, each in (world.mirror or {}).items()
        if each.metadata == "whole" and step <= stays(world, MIRROR)
    }
    found = {(step, 1, seal): {*FILES} for step, seal in copies.items()}  # the disks' version of a step is preferred
    for leader, stored in world.disks.items():
        for step, each in stored.items():
            if step > stays(world, leader):
                continue
            if world.mirror is None:
                found[step, 2, 0] = {*FILES}
            elif each.metadata == each.manifest == "whole":
                key = (step, 1 if copies.get(step) == each.seal else 2, each.seal)
                found.setdefault(key, set()).update(each.present)
    complete = [
        (step, only_here, seal)
        for (step, only_here, seal), files in found.items()
        if files == {*FILES}
        and step not in unread
        and (step > 0 or request.resume != "never")
        and (only_here == 1 or world.is_shared or (step, seal) not in world.spoilt)
    ]
    return (max(complete)[0], max(complete)[2]) if complete else None


def own_start(world: Locations, request: ResumeRequest) -> bool:
    last = world.records.newest.returns[-1:]
    has_returned = bool(last) and (last[0].told, last[0].job) == (request.resume, request.job)
    return request.resume == "auto" or (request.is_restart and has_returned)


@drawn
@given(worlds(), REQUESTS, st.frozensets(STEPS, max_size=1))
def test_the_newest_complete_checkpoint_wins(world: Locations, request: ResumeRequest, unread: frozenset[int]) -> None:
    assume(own_start(world, request))
    _, end, _ = decide(world, request, replace(world.survey, unread=unread))
    wanted = expected(world, request, unread)
    if wanted is None:
        assert isinstance(end, Refuse) or end.step is None
        return
    assert isinstance(end, ResumeStart)
    assert (end.own, end.step) == (True, wanted[0])
    for leader, sources in end.sources.items():
        stored = world.disks[leader].get(wanted[0])
        if world.mirror is None:
            assert sources == ("disk",)
            continue
        assert sources, "every disk's ranks read from somewhere"
        if "disk" in sources:
            assert stored is not None
            assert stored == replace(stored, seal=wanted[1], metadata="whole", manifest="whole")
            assert wanted[0] <= stays(world, leader)
        assert sources[-1:] == ("mirror",) or world.is_shared


@drawn
@given(worlds(), REQUESTS)
def test_nothing_that_was_abandoned_or_put_aside_is_read(world: Locations, request: ResumeRequest) -> None:
    survey, end, plans = decide(world, request)
    if not isinstance(end, ResumeStart) or end.step is None:
        return
    uploads = {plan.version[0] for plan in plans if isinstance(plan, Upload)}
    damaged = {
        (n, step) for plan in plans if isinstance(plan, Quarantine) for n in plan.damaged for step in plan.damaged[n]
    }
    for leader, sources in end.sources.items():
        if "disk" in sources:
            assert end.step <= stays(world, leader)
            assert (leader, end.step) not in damaged
            assert end.step in survey.listed[leader].seals
        if "mirror" in sources:
            assert end.step <= stays(world, MIRROR) or end.step in uploads
            assert end.step in survey.in_mirror


@drawn
@given(worlds(), REQUESTS, st.frozensets(STEPS, max_size=1))
def test_no_start_from_scratch_while_checkpoints_are_damaged_or_unread(
    world: Locations, request: ResumeRequest, unread: frozenset[int]
) -> None:
    assume(own_start(world, request) and request.resume in {"auto", "never"})
    survey, end, _ = decide(world, request, replace(world.survey, unread=unread))
    spoilt = unread | {
        step for each in survey.listed.values() for step in (*each.quarantined.values(), *each.unread, *each.damaged)
    }
    if isinstance(end, Refuse):
        assert spoilt
        assert "cannot be read" in end.error or "is damaged" in end.error
    elif end.step is None:
        assert not spoilt


@drawn
@given(worlds(), REQUESTS)
def test_a_rewind_looks_at_no_checkpoint_and_abandons_what_is_later_everywhere(
    world: Locations, request: ResumeRequest
) -> None:
    assume(not own_start(world, request))
    survey, end, plans = decide(world, request)
    if isinstance(end, Refuse):
        assert request.is_restart
        assert world.records.damaged
        return
    assert {type(plan) for plan in plans} <= {Repeat, Locate, ResumeStart}
    keeps = 0 if request.resume == "never" else -1
    assert (end.own, end.step, end.abandon.damaged) == (False, None, True)
    assert end.history.returns[-1] == Rewind(told=request.resume, job=request.job, keeps=keeps)
    assert end.abandon.after == {where: min(keeps, stays(world, where)) for where in world.records.places}
    is_repeated = world.records.newest.has_returned(request.resume, request.job)
    assert any(isinstance(plan, Repeat) for plan in plans) == is_repeated
    assert not survey.records.newest.has_returned(request.resume, request.job)


@drawn
@given(worlds(), REQUESTS)
def test_a_resume_abandons_what_is_later_and_adds_no_rewind(world: Locations, request: ResumeRequest) -> None:
    _, end, _ = decide(world, request)
    assume(isinstance(end, ResumeStart) and end.own)
    assert isinstance(end, ResumeStart)
    last = end.step or 0
    assert end.abandon == Abandon(dict.fromkeys(world.records.places, last), damaged=False)
    assert end.history == world.records.newest


@pytest.mark.parametrize(("on_disk", "in_mirror", "keeps"), [(3, None, 3), (None, 2, 2), (3, 2, 3), (None, None, -1)])
def test_a_requested_checkpoint_of_the_run_stays(on_disk: int | None, in_mirror: int | None, keeps: int) -> None:
    """A location that missed a rewind to step 1 keeps its later checkpoints if the requested one is among them."""
    history = RunHistory(run="one", run_dir="/run", returns=(Rewind(told="x", keeps=1),))
    before = replace_returns(history)
    survey = ResumeSurvey(
        Path("/run"),
        "/mirror",
        Records({0: history, 1: before, MIRROR: before}, FRESH),
        is_shared=False,
        located=Located(Path("/a"), on_disk, in_mirror),
    )
    end = plan_resume(survey, ResumeRequest("/a"))
    assert isinstance(end, ResumeStart)
    assert end.history.returns[-1].keeps == keeps
    after = {place: keeps if kept is not None else min(keeps, 1) for place, kept in ((1, on_disk), (MIRROR, in_mirror))}
    assert end.abandon == Abandon({0: keeps, **after}, damaged=True)


def replace_returns(history: RunHistory) -> RunHistory:
    return history.model_copy(update={"returns": ()})


def two_disks(
    first: Mapping[int, Stored], second: Mapping[int, Stored], mirror: Mapping[int, Stored], records: Records
) -> Locations:
    quarantined: dict[int, dict[str, int]] = {MIRROR: {}, 0: {}, 1: {}}
    return Locations({0: first, 1: second}, mirror, quarantined, records, frozenset(), is_shared=False)


@pytest.mark.parametrize("behind", ["a disk", "the mirror"])
def test_a_location_that_missed_a_rewind_gives_up_what_is_later(behind: str) -> None:
    before = RunHistory(run="one", run_dir="/run")
    after = before.model_copy(update={"returns": (Rewind(told="/a", keeps=1),)})
    own, other = {1: Stored(1)}, {1: Stored(1), 3: Stored(1)}
    on_disk = behind == "a disk"
    places = {0: after, 1: before if on_disk else after, MIRROR: after if on_disk else before}
    world = two_disks(own, other if on_disk else own, own if on_disk else other, Records(places, FRESH))
    survey, end, plans = decide(world, ResumeRequest("auto"))
    assert plans[1] == Abandon({1 if on_disk else MIRROR: 1})
    assert (survey.listed[1].last, survey.listed[MIRROR].last) == (1, 1)
    assert isinstance(end, ResumeStart)
    assert (end.step, end.sources) == (1, {0: ("disk", "mirror"), 1: ("disk", "mirror")})


def test_a_mirror_that_missed_a_rewind_keeps_what_this_start_copies_to_it() -> None:
    before = RunHistory(run="one", run_dir="/run")
    after = before.model_copy(update={"returns": (Rewind(told="/a", keeps=1),)})
    world = two_disks({4: Stored(1)}, {}, {3: Stored(1)}, Records({0: after, 1: after, MIRROR: before}, FRESH))
    _, end, plans = decide(world, ResumeRequest("auto"))
    assert [type(plan) for plan in plans] == [Look, Abandon, Inspect, Upload, ResumeStart]
    assert isinstance(end, ResumeStart)
    assert (end.step, end.sources) == (4, {0: ("disk", "mirror"), 1: ("mirror",)})


def test_of_two_versions_of_a_step_on_disks_that_share_nothing_one_is_copied_and_taken() -> None:
    world = two_disks({4: Stored(1)}, {4: Stored(2)}, {}, Records({0: FRESH, 1: FRESH, MIRROR: FRESH}, FRESH))
    _, end, plans = decide(world, ResumeRequest("auto"))
    assert [plan.version for plan in plans if isinstance(plan, Upload)] == [(4, 2)]
    assert isinstance(end, ResumeStart)
    assert (end.step, end.sources) == (4, {0: ("mirror",), 1: ("disk", "mirror")})


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_conversion_is_no_start_from_scratch(resume: str) -> None:
    history = FRESH.model_copy(update={"returns": (Rewind(told="never", keeps=0),)})
    world = Locations({0: {0: Stored(1)}}, None, {0: {}}, Records({0: history}, FRESH), frozenset(), is_shared=True)
    _, end, _ = decide(world, ResumeRequest(resume, is_restart=True))
    assert isinstance(end, ResumeStart)
    assert (end.own, end.step) == ((True, 0) if resume == "auto" else (False, None))


def test_the_version_of_the_disks_wins_over_that_of_the_mirror() -> None:
    records = Records({0: FRESH, MIRROR: FRESH}, FRESH)
    world = Locations({0: {4: Stored(1)}}, {4: Stored(2)}, {0: {}, MIRROR: {}}, records, frozenset(), is_shared=True)
    _, end, _ = decide(world, ResumeRequest("auto"))
    assert isinstance(end, ResumeStart)
    assert (end.step, end.sources) == (4, {0: ("disk",)})


def test_no_restart_guesses_without_a_record_whether_it_went_back() -> None:
    damaged = DamagedError("lineage.json", "its content is not what was written")
    survey = ResumeSurvey(Path("/run"), "", Records({0: damaged}, FRESH))
    refused = plan_resume(survey, ResumeRequest("never", is_restart=True))
    assert isinstance(refused, Refuse)
    assert "is still to" in refused.error
    started = plan_resume(survey, ResumeRequest("never"))
    assert isinstance(started, ResumeStart)
    assert started.lines == (f"WARNING: {damaged}; it is written anew",)


@pytest.mark.parametrize("other", ["/run", "/elsewhere"])
def test_a_mirror_of_another_run_is_refused_unless_it_is_asked_for(other: str) -> None:
    mirror = RunHistory(run="two", run_dir=other)
    ours = RunHistory(run="one", run_dir="/run")
    survey = ResumeSurvey(Path("/run"), "/mirror", Records({0: ours, MIRROR: mirror}, FRESH))
    refused = plan_resume(survey, ResumeRequest("auto"))
    assert isinstance(refused, Refuse)
    assert "belongs to another run" in refused.error
    survey = replace(survey, located=Located(Path("/mirror/step-00000003"), None, 3))
    taken = plan_resume(survey, ResumeRequest("/mirror", aims_at_mirror=True))
    assert isinstance(taken, ResumeStart)
    assert taken.abandon == Abandon({0: -1, MIRROR: 3}, damaged=True)
    assert taken.history.run == "fresh"


def test_disks_of_different_runs_are_refused() -> None:
    places: dict[int, Record] = {0: RunHistory(run="one", run_dir="/run"), 1: RunHistory(run="two", run_dir="/run")}
    refused = plan_resume(ResumeSurvey(Path("/run"), "/mirror", Records(places, FRESH)), ResumeRequest("auto"))
    assert isinstance(refused, Refuse)
    assert "different runs on different nodes" in refused.error
