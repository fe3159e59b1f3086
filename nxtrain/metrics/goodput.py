"""Goodput: which share of the time since a run's first start went into steps that stand, and where the rest went.

`logs/goodput.jsonl` has what each start spent, added up, whenever it logs or saves; `logs/goodput.json` the same a
second ago or so, since who is killed says nothing. What a killed start did after that, and how long it took to notice
that it was gone, counts as restart. On devices that compute behind the host, a step that is not logged counts as
finished when it is queued.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nxtrain.metrics.uptime import Instant, now

GOODPUT_FILE = "goodput.jsonl"
LATEST_FILE = "goodput.json"

REFRESH_S = 1.0
"""Between writes of the latest state."""

PAUSES = {"evaluation": "eval_s", "checkpoint": "stall_s"}
"""Work of a run that is no training, and where its time is counted."""


@dataclass(frozen=True)
class Spent:
    """What one start has spent, up to its last progress: a finished step, evaluation or checkpoint.

    Args:
        step: The last that it finished.
        start_s: Until its first step was finished: imports, data, checkpoint, compilation.
        train_s: In the steps after that.
        eval_s: In evaluations.
        stall_s: Waiting for checkpoints.
        saves: Checkpoints that were committed.
        save_stall_s: What training waited for these, but for a last one that is waited for.
        save_write_s: What they took to be written meanwhile.
    """

    step: int
    start_s: float = 0.0
    train_s: float = 0.0
    eval_s: float = 0.0
    stall_s: float = 0.0
    saves: int = 0
    save_stall_s: float = 0.0
    save_write_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from the start to the last progress."""
        return self.start_s + self.train_s + self.eval_s + self.stall_s


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Args:
        resumed: The step after which it went on.
        began: When its process was started.
        seen: When it last said something.
        spent: What it had spent by then.
        outcome: How it ended: `done`, `stopped`, `failed`, `killed`; empty while it runs.
        course: Some finished steps, each with `train_s` by then.
    """

    resumed: int
    began: Instant
    seen: Instant
    spent: Spent
    outcome: str = ""
    course: list[tuple[int, float]] = field(default_factory=list)

    def train_s(self, step: int) -> float:
        """Seconds of training up to a step that it finished; between known steps all take alike."""
        known = [(self.resumed, 0.0), *self.course, (self.spent.step, self.spent.train_s)]
        after = bisect_right([at for at, _ in known], step)
        if after == len(known):
            return self.spent.train_s
        (first, begin_s), (last, end_s) = known[after - 1], known[after]
        return begin_s + (end_s - begin_s) * (step - first) / (last - first)


@dataclass(frozen=True)
class Goodput:
    """Where the time since a run's first start went. The parts add up to `wall_s`.

    Args:
        starts: How many there were.
        wall_s: Since the first; what passes between the end of a finished run and its next start does not count.
        productive_s: In steps that stand; the first of each start counts as start or restart.
        start_s: From the first start to its first finished step.
        lost_steps: Steps that a later start had to do again,
        lost_s: and what they took.
        detect_s: From the last progress of a start that failed to its end, as far as that is known.
        restart_s: From there to the first finished step of the next start.
        checkpoint_stall_s: Training waited for checkpoints.
        eval_s: In evaluations.
        other_s: The rest, such as the end of a run.
    """

    starts: int = 0
    wall_s: float = 0.0
    productive_s: float = 0.0
    start_s: float = 0.0
    lost_steps: int = 0
    lost_s: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 0.0
    checkpoint_stall_s: float = 0.0
    eval_s: float = 0.0
    other_s: float = 0.0

    @property
    def goodput(self) -> float:
        """The productive share, from 0 to 1."""
        return self.productive_s / self.wall_s if self.wall_s else 0.0

    def record(self) -> dict[str, float]:
        """The keys by which drills are compared."""
        keys = ("lost_steps", "lost_s", "detect_s", "restart_s", "goodput")
        return {key: round(getattr(self, key), 6) for key in keys}

    def __str__(self) -> str:
        """One line for people; parts that hardly took any time are left out unless they tell of failures."""
        steps = f"{self.lost_steps} step{'s' * (self.lost_steps != 1)}"
        parts = {
            f"lost {steps} ({_time(self.lost_s)})": self.starts > 1,
            f"detection {_time(self.detect_s)}": self.starts > 1,
            f"restart {_time(self.restart_s)}": self.starts > 1,
            f"checkpoints {_time(self.checkpoint_stall_s)}": True,
            f"first start {_time(self.start_s)}": self.start_s >= _SHOWN_S,
            f"evaluation {_time(self.eval_s)}": self.eval_s >= _SHOWN_S,
            f"other {_time(self.other_s)}": self.other_s >= _SHOWN_S,
        }
        return (
            f"goodput {self.goodput:.1%} over {self.starts} start{'s' * (self.starts != 1)}: "
            f"{_time(self.productive_s)} productive of {_time(self.wall_s)}; "
            + ", ".join(part for part, shown in parts.items() if shown)
        )


def account(starts: Sequence[Start]) -> Goodput:
    """Add up what the starts of a run spent."""
    found: dict[str, float] = dict.fromkeys((part for part in asdict(Goodput()) if part.endswith("_s")), 0.0)
    lost_steps = 0
    stands = _standing(starts)
    for index, (start, stood) in enumerate(zip(starts, stands, strict=True)):
        spent, elapsed_s = start.spent, start.seen.up - start.began.up
        begins = "restart_s" if index else "start_s"
        found["wall_s"] += elapsed_s
        found[begins] += spent.start_s
        found["checkpoint_stall_s"] += spent.stall_s
        found["eval_s"] += spent.eval_s
        productive_s = start.train_s(stood)
        found["productive_s"] += productive_s
        found["lost_s"] += spent.train_s - productive_s
        lost_steps += spent.step - stood
        tail_s = elapsed_s - spent.total_s
        if spent.step == start.resumed and start.outcome not in {"done", "stopped"}:
            found[begins] += tail_s
        else:
            found["detect_s" if start.outcome in {"failed", "killed"} else "other_s"] += tail_s
        if index and starts[index - 1].outcome != "done":
            gap_s = start.began.since(starts[index - 1].seen)
            found["wall_s"] += gap_s
            found["restart_s"] += gap_s
    return Goodput(starts=len(starts), lost_steps=lost_steps, **found)


def read(logs: Path) -> list[Start]:
    """The starts that a folder tells of; the last one that does not say how it ended ends with what was last seen.

    Args:
        logs: Where the files are.
    """
    found: list[Start] = []
    for line in _lines(logs / GOODPUT_FILE):
        with suppress(KeyError, TypeError, IndexError):  # a line that is none of ours, or whose start is missing
            _take(found, line)
    if found and not found[-1].outcome:
        with suppress(OSError, ValueError, KeyError, TypeError):
            latest = json.loads((logs / LATEST_FILE).read_text(encoding="utf-8"))
            if latest["up"] > found[-1].seen.up:
                _take(found, latest)
    return found


@dataclass
class GoodputMeter:
    """Counts the time of a run into its folder; the leader has one. A disk that fails costs the count, not the run.

    Args:
        logs: Folder of the files.
        told: Takes lines for people.
        began: When this process was started; None: when it begins to train.
        clock: Gives the moment.
    """

    logs: Path
    told: Callable[[str], None] = lambda line: None
    began: Instant | None = None
    clock: Callable[[], Instant] = now
    _past: list[Start] = field(default_factory=list, init=False)
    _start: Start | None = field(default=None, init=False)
    _section: str = field(default="train_s", init=False)
    _settled: float = field(default=0.0, init=False)
    _next_beat: float = field(default=0.0, init=False)

    def begin(self, resumed: int) -> None:
        """Note a start, which goes on after a step."""
        self._past = read(self.logs)
        present = self.clock()
        began = self.began or present
        if self._past:
            last = self._past[-1]
            if not last.outcome:
                last = self._past[-1] = replace(last, outcome="killed")
                self._append("end", last, outcome="killed")
            if began.boot and began.boot == last.seen.boot and began.up < last.seen.up:
                began = last.seen  # one process that started a run twice
        self._settled = began.up
        self._start = Start(resumed, began, present, Spent(resumed))
        # Where earlier starts stand is known from here on, and all that is asked of their courses.
        stands = zip(self._past, _standing([*self._past, self._start])[:-1], strict=True)
        self._past = [replace(past, course=[(stood, past.train_s(stood))]) for past, stood in stands]
        self._append("start", self._start, began_wall=began.wall, resumed=resumed)

    def enter(self, step: int, work: str) -> None:
        """Begin some work; an evaluation and a checkpoint come after their step."""
        if self._start is not None and work in PAUSES:
            self._finish(step)
            self._settle()
            self._section = PAUSES[work]

    def finish(self, step: int) -> None:
        """Note that a step is finished, and all that follows it; the next one begins."""
        if self._start is None:
            return
        saved = self._section == "stall_s"
        self._finish(step)
        self._settle()
        self._section = "train_s"
        if saved:
            self._append("saved", self._start)

    def log(self, step: int) -> float:
        """Note that a step is finished and that its results were read; the goodput so far."""
        if self._start is None:
            return 0.0
        self.finish(step)
        self._append("log", self._start)
        return self.read().goodput

    def saved(self, stall_s: float, write_s: float) -> None:
        """Note that a checkpoint was committed.

        Args:
            stall_s: What training waited for it.
            write_s: What it took to be written after that.
        """
        if self._start is not None:
            spent = self._start.spent
            self._spend(
                saves=spent.saves + 1,
                save_stall_s=spent.save_stall_s + stall_s,
                save_write_s=spent.save_write_s + write_s,
            )

    def beat(self) -> None:
        """Leave what is known now for whoever comes after; written once in a while, from any thread."""
        start = self._start
        if start is None or start.outcome or time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + REFRESH_S
        new = self.logs / f"{LATEST_FILE}.tmp"
        line = self._line("beat", replace(start, seen=self.clock()))
        with suppress(OSError):
            new.write_text(json.dumps(line) + "\n", encoding="utf-8")
            new.replace(self.logs / LATEST_FILE)

    def end(self, outcome: str) -> None:
        """Note the end: `done`, `stopped` or `failed`."""
        if self._start is None:
            return
        if outcome != "failed" and self._section in PAUSES.values():
            self._settle()
        self._start = replace(self._start, outcome=outcome, seen=self.clock())
        found = self.read()
        self._append("end", self._start, outcome=outcome, **found.record())
        if outcome != "failed":  # of which the next start tells
            self.told(str(found))

    def read(self) -> Goodput:
        """Where the time went, up to now."""
        present = [] if self._start is None else [self._start]
        if present and not present[0].outcome:
            present = [replace(present[0], seen=self.clock())]
        return account([*self._past, *present])

    def _finish(self, step: int) -> None:
        """Count the time since the last progress as that of a step."""
        assert self._start is not None
        first = self._start.spent.step == self._start.resumed
        if step == self._start.spent.step:
            return
        self._section = "start_s" if first else "train_s"
        self._spend(step=step)
        self._settle()
        if first and self._past:
            self.told(str(self.read()))

    def _settle(self) -> None:
        """Count the time since the last progress to the present section."""
        assert self._start is not None
        if self._start.spent.step > self._start.resumed:
            up = self.clock().up
            self._spend(**{self._section: getattr(self._start.spent, self._section) + up - self._settled})
            self._settled = up

    def _spend(self, **changed: Any) -> None:
        assert self._start is not None
        self._start = replace(self._start, spent=replace(self._start.spent, **changed))

    def _append(self, event: str, start: Start, **more: Any) -> None:
        file = self.logs / GOODPUT_FILE
        with suppress(OSError):
            self.logs.mkdir(parents=True, exist_ok=True)
            # Whatever was torn off before ends here, and readers skip empty lines.
            with file.open("a", encoding="utf-8") as lines:
                before = "\n" * (event in {"start", "end"} and lines.tell() > 0)
                line = self._line(event, replace(start, seen=start.seen if start.outcome else self.clock()))
                lines.write(before + json.dumps({**line, **more}) + "\n")

    @staticmethod
    def _line(event: str, start: Start) -> dict[str, Any]:
        rounded = {key: round(value, 6) for key, value in asdict(start.spent).items()}
        seen, began = start.seen, start.began
        return {"event": event, "boot": began.boot, "began": began.up, "up": seen.up, "wall": seen.wall, **rounded}


def _standing(starts: Sequence[Start]) -> list[int]:
    """Of each start the last step that no later one did again."""
    found, least = [], max((start.spent.step for start in starts), default=0)
    for start in reversed(starts):
        found.append(max(start.resumed, min(start.spent.step, least)))
        least = min(least, start.resumed)
    return found[::-1]


def _take(found: list[Start], line: dict[str, Any]) -> None:
    """Add what a line tells to the starts so far."""
    spent = Spent(**{key: line[key] for key in _SPENT})
    if line["event"] == "start":
        began = Instant(line["boot"], line["began"], line["began_wall"])
        found.append(Start(line["resumed"], began, Instant(line["boot"], line["up"], line["wall"]), spent))
        return
    last = found[-1]
    if last.outcome or (line["boot"], line["began"]) != (last.began.boot, last.began.up):
        return  # of a start whose first line is lost
    seen = Instant(last.began.boot, line["up"], line["wall"])
    if spent.step > (last.course[-1][0] if last.course else last.resumed):
        last.course.append((spent.step, spent.train_s))
    found[-1] = replace(last, seen=seen, spent=spent, outcome=line.get("outcome", ""))


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; one that was torn is left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


_SPENT = tuple(asdict(Spent(0)))

_SHOWN_S = 0.05
"""Rounds to more than nothing."""


def _time(seconds: float) -> str:
    for unit, unit_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.1f} s"
