"""Rules of the decision which checkpoint a run resumes from, over drawn disks, mirrors and records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nxtrain.checkpoint.resume_decision import Resume, Upload, decide
from nxtrain.checkpoint.resume_survey import LocationSurvey, ResumeRequest, ResumeSurvey, Version, read_manifests
from nxtrain.checkpoint.rewinds import Record, Records, Rewind, RunHistory
from nxtrain.checkpoint.run_locations import MIRROR
from nxtrain.common.errors import DamagedError, NxtrainError
from tests.unit.checkpoint.test_resume_decision import AWAY, FILES, FRESH, OTHER, RUN, in_mirror, on_disk

K = TypeVar("K")
V = TypeVar("V")

State = Literal["whole", "damaged", "unread"]


@dataclass(frozen=True)
class Stored:
    """True state of one checkpoint on one disk or in the mirror."""

    seal: int
    metadata: State = "whole"
    manifest: State = "whole"
    present: tuple[str, ...] = FILES


@dataclass(frozen=True)
class World:
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


class Start:
    """A start on drawn locations: surveys, decisions and acts up to a checkpoint, to scratch or to an error."""

    def __init__(self, world: World, request: ResumeRequest, unread: frozenset[int] = frozenset()) -> None:
        self.world, self.request, self.records = world, request, world.records
        self.content = {where: dict(stored) for where, stored in world.disks.items()}
        if world.mirror is not None:
            self.content[MIRROR] = dict(world.mirror)
        self.quarantined = {where: dict(names) for where, names in world.quarantined.items()}
        self.unread = {(where, step) for where in self.content for step in unread}
        self.rejected = set[Version]()
        self.decisions: list[Resume] = []
        for _ in range(60):
            self.survey = self.look()
            decision = decide(self.survey, request)
            again = decide(reversed_order(self.survey), request)
            assert (replace(again, error=None), str(again.error)) == (
                replace(decision, error=None),
                str(decision.error),
            )
            self.decisions.append(decision)
            if decision.error or self.act(decision):
                return
        raise AssertionError(f"no end: {self.decisions[-4:]}")

    @property
    def end(self) -> Resume:
        return self.decisions[-1]

    @property
    def step(self) -> int | None:
        """Step of the own checkpoint."""
        if not self.end.is_own or not self.end.sources:
            return None
        return self.end.abandon[0]

    def look(self) -> ResumeSurvey:
        root = None if self.world.mirror is None else AWAY
        survey = ResumeSurvey(RUN, root, self.records, self.world.is_shared, rejected=frozenset(self.rejected))
        if self.request.resume not in {"auto", "never"}:
            survey = replace(survey, requested=OTHER)
        if not self.request.goes_on(self.records.newest):
            return survey
        survey = replace(survey, locations={where: self.listed(where) for where in self.content})
        return survey if root is None else read_manifests(survey, self.request, self.read)

    def listed(self, where: int) -> LocationSurvey:
        names = self.quarantined.get(where, {})
        steps = {step: stored for step, stored in self.content[where].items() if (where, step) not in self.unread}
        unread = frozenset(step for location, step in self.unread if location == where)
        if self.world.mirror is None:
            return LocationSurvey(dict.fromkeys(steps, 0), unread=unread, quarantined=names)
        seals = {step: stored.seal for step, stored in steps.items() if stored.metadata == "whole"}
        damaged = {step: error(stored.metadata) for step, stored in steps.items() if stored.metadata != "whole"}
        return LocationSurvey(seals, damaged, unread, names)

    def read(self, version: Version) -> dict[int, Mapping[str, bool] | DamagedError]:
        results: dict[int, Mapping[str, bool] | DamagedError] = {}
        for leader in self.world.disks:
            stored = self.content[leader].get(version[0])
            results[leader] = {}
            if stored is None or stored.metadata != "whole" or (stored.seal, leader) != (version[1], leader):
                continue
            if (leader, version[0]) in self.unread:
                continue
            if stored.manifest == "whole":
                results[leader] = {name: name in stored.present for name in FILES}
            else:
                results[leader] = error(stored.manifest)
        return results

    def act(self, decision: Resume) -> bool:
        for where, last in decision.catch_up.items():
            self.content[where] = {step: stored for step, stored in self.content[where].items() if step <= last}
            self.quarantined[where] = {name: step for name, step in self.quarantined[where].items() if step <= last}
            self.unread = {(location, step) for location, step in self.unread if location != where or step <= last}
        if decision.catch_up:
            newest = dict.fromkeys(decision.catch_up, self.records.newest)
            self.records = replace(self.records, locations={**self.records.locations, **newest})
        for where, errors in decision.quarantine.items():
            for step, problem in errors.items():
                if problem.unread:
                    self.unread.add((where, step))
                else:
                    del self.content[where][step]
                    self.quarantined[where][f"step-{step:08d}.corrupt@{where}"] = step
        if decision.catch_up or decision.quarantine:
            return False
        if decision.upload is not None:
            step, seal = decision.upload.version
            senders = decision.upload.senders.values()
            assert sorted(name for files in senders for name in files) == sorted(FILES), "each file once"
            assert self.content[decision.upload.finisher][step].manifest == "whole"
            if (step, seal) in self.world.spoilt:
                self.rejected.add((step, seal))
                return False
            self.content[MIRROR][step] = Stored(seal)
        return True


def error(state: State) -> DamagedError:
    return DamagedError("file", "its reason", unread=state == "unread")


def reversed_order(survey: ResumeSurvey) -> ResumeSurvey:
    """The same survey, put together in another order, as by another rank."""
    locations = {}
    for where, location in turned(survey.locations).items():
        locations[where] = replace(location, seals=turned(location.seals), damaged=turned(location.damaged))
    records = replace(survey.records, locations=turned(survey.records.locations))
    files = {version: turned(disks) for version, disks in turned(survey.files).items()}
    return replace(survey, records=records, locations=locations, files=files)


def turned(mapping: Mapping[K, V]) -> dict[K, V]:
    return dict(reversed([*mapping.items()]))


STEPS = st.integers(0, 4)
STATES: st.SearchStrategy[State] = st.sampled_from(["whole", "whole", "whole", "damaged", "unread"])
STORED = st.builds(Stored, st.integers(1, 2), STATES, STATES, st.sampled_from([FILES, FILES, ("a",), ("b",), ()]))
REWINDS = st.lists(st.builds(Rewind, told=st.just("never"), keeps=st.none() | st.integers(-1, 4)), max_size=2)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    leaders = range(draw(st.integers(1, 3)))
    mirrored = len(leaders) > 1 or draw(st.booleans())
    returns = tuple(draw(REWINDS))

    def record() -> Record:
        if draw(st.integers(0, 9)) == 0:
            return DamagedError("lineage.json", "its checksum does not match its content")
        seen = draw(st.integers(-1, len(returns)))
        return None if seen < 0 else RunHistory(run="one", run_dir="/run", returns=returns[:seen])

    def quarantined(where: int) -> dict[str, int]:
        return {f"step-{step:08d}.corrupt@{where}": step for step in draw(st.sets(STEPS, max_size=1))}

    whole = RunHistory(run="one", run_dir="/run", returns=returns)
    records = {leader: record() for leader in leaders} | ({MIRROR: whole} if mirrored else {})
    if draw(st.booleans()):
        records |= {leaders[-1]: whole} | ({MIRROR: record()} if mirrored else {})
    return World(
        {leader: draw(st.dictionaries(STEPS, STORED, max_size=3)) for leader in leaders},
        draw(st.dictionaries(STEPS, STORED, max_size=3)) if mirrored else None,
        {where: quarantined(where) if draw(st.booleans()) else {} for where in (MIRROR, *leaders)},
        Records(records, FRESH),
        frozenset(draw(st.sets(st.tuples(STEPS, st.integers(1, 2)), max_size=2))),
        is_shared=len(leaders) == 1,
    )


REQUESTS = st.builds(
    ResumeRequest, st.sampled_from(["auto", "auto", "never", "/other"]), st.booleans(), st.sampled_from(["", "7"])
)
drawn = settings(max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])


def stays(world: World, where: int) -> int:
    """Last step of a location that no missed rewind abandoned."""
    missed = world.records.missed(where)
    return 99 if missed is None else missed


def expected(world: World, request: ResumeRequest, unread: frozenset[int] = frozenset()) -> Version | None:
    """The newest complete version, by looking at everything at once."""
    copies = {
        step: stored.seal
        for step, stored in (world.mirror or {}).items()
        if stored.metadata == "whole" and step <= stays(world, MIRROR)
    }
    actual = {(step, 1, seal): {*FILES} for step, seal in copies.items()}  # the disks' version of a step is preferred
    for leader, checkpoints in world.disks.items():
        for step, stored in checkpoints.items():
            if step > stays(world, leader):
                continue
            if world.mirror is None:
                actual[step, 2, 0] = {*FILES}
            elif stored.metadata == stored.manifest == "whole":
                key = (step, 1 if copies.get(step) == stored.seal else 2, stored.seal)
                actual.setdefault(key, set()).update(stored.present)
    complete = [
        (step, only_here, seal)
        for (step, only_here, seal), files in actual.items()
        if files == {*FILES}
        and step not in unread
        and (step > 0 or request.resume != "never")
        and (only_here == 1 or world.is_shared or (step, seal) not in world.spoilt)
    ]
    return (max(complete)[0], max(complete)[2]) if complete else None


def own_start(world: World, request: ResumeRequest) -> bool:
    last = world.records.newest.returns[-1:]
    has_rewound = bool(last) and (last[0].told, last[0].job) == (request.resume, request.job)
    return request.resume == "auto" or (request.is_restart and has_rewound)


@drawn
@given(worlds(), REQUESTS, st.frozensets(STEPS, max_size=1))
def test_the_newest_complete_checkpoint_wins(world: World, request: ResumeRequest, unread: frozenset[int]) -> None:
    assume(own_start(world, request))
    start = Start(world, request, unread)
    wanted = expected(world, request, unread)
    if wanted is None:
        assert start.step is None
        return
    assert start.step == wanted[0]
    for leader, sources in start.end.sources.items():
        stored = world.disks[leader].get(wanted[0])
        if world.mirror is None:
            assert sources == (on_disk(wanted[0]),)
            continue
        assert sources, "every disk's ranks read from somewhere"
        if on_disk(wanted[0]) in sources:
            assert stored is not None
            assert stored == replace(stored, seal=wanted[1], metadata="whole", manifest="whole")
            assert wanted[0] <= stays(world, leader)
        assert sources[-1] == in_mirror(wanted[0]) or world.is_shared


@drawn
@given(worlds(), REQUESTS)
def test_nothing_that_was_abandoned_or_quarantined_is_read(world: World, request: ResumeRequest) -> None:
    start = Start(world, request)
    if start.step is None:
        return
    damaged = {
        (where, step)
        for decision in start.decisions
        for where in decision.quarantine
        for step in decision.quarantine[where]
    }
    for leader, sources in start.end.sources.items():
        if on_disk(start.step) in sources:
            assert start.step <= stays(world, leader)
            assert (leader, start.step) not in damaged
            assert start.step in start.content[leader]
        if in_mirror(start.step) in sources:
            assert start.step <= stays(world, MIRROR) or start.end.upload is not None
            assert start.step in start.content[MIRROR]


@drawn
@given(worlds(), REQUESTS, st.frozensets(STEPS, max_size=1))
def test_no_start_from_scratch_while_checkpoints_are_damaged_or_unread(
    world: World, request: ResumeRequest, unread: frozenset[int]
) -> None:
    assume(own_start(world, request) and request.resume in {"auto", "never"})
    start = Start(world, request, unread)
    spoilt = {
        step for names in start.survey.locations.values() for step in (*names.quarantined.values(), *names.unread)
    }
    if start.end.error is not None:
        assert spoilt
        assert "cannot be read" in str(start.end.error) or "is damaged" in str(start.end.error)
    elif start.step is None:
        assert not spoilt


@drawn
@given(worlds(), REQUESTS)
def test_a_rewind_looks_at_no_checkpoint_and_abandons_what_is_later_everywhere(
    world: World, request: ResumeRequest
) -> None:
    assume(not own_start(world, request))
    start = Start(world, request)
    (end,) = start.decisions
    assert not start.survey.locations
    if isinstance(end.error, NxtrainError):
        assert request.is_restart
        assert world.records.damaged
        return
    keeps = 0 if request.resume == "never" else -1
    assert (end.is_own, start.step) == (False, None)
    assert end.record is not None
    assert end.record.returns[-1] == Rewind(told=request.resume, job=request.job, keeps=keeps)
    assert end.abandon == {where: min(keeps, stays(world, where)) for where in world.records.locations}
    is_repeated = world.records.newest.has_rewound(request.resume, request.job)
    assert (end.repeated is not None) == is_repeated
    assert end.repeated is None or not end.repeated.has_rewound(request.resume, request.job)


@drawn
@given(worlds(), REQUESTS)
def test_a_resume_abandons_what_is_later_and_adds_no_rewind(world: World, request: ResumeRequest) -> None:
    start = Start(world, request)
    assume(start.end.is_own)
    assert start.end.abandon == dict.fromkeys(world.records.locations, start.step or 0)
    assert start.end.record == world.records.newest


def test_a_mirror_that_missed_a_rewind_keeps_what_this_start_copies_to_it() -> None:
    history = FRESH.model_copy(update={"returns": (Rewind(told="/a", keeps=1),)})
    records = Records({0: history, 1: history, MIRROR: FRESH}, FRESH)
    world = World({0: {4: Stored(1)}, 1: {}}, {3: Stored(1)}, {MIRROR: {}}, records, frozenset(), is_shared=False)
    start = Start(world, ResumeRequest("auto"))
    first, second = start.decisions
    assert (first.catch_up, second.upload) == ({MIRROR: 1}, Upload((4, 1), {0: FILES}, finisher=0))
    assert second.sources == {0: (on_disk(4), in_mirror(4)), 1: (in_mirror(4),)}
    start.unread = {(where, 4) for where in start.content}  # none of its copies can be read
    assert decide(start.look(), ResumeRequest("auto")).catch_up == {}
