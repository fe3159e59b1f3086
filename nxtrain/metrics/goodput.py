"""Goodput: which share of the time since a run's first start went into steps that stand, and where the rest went.

`goodput_meter` counts what a start spends, and `goodput_log` keeps it in the run folder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from nxtrain.process.clock import Instant

MOST_POINTS, EXACT_POINTS = 48, 16
"""Steps of a start that are kept with the time until then, and the newest of them, which stay when there are more."""


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
        course: Finished steps at which it saved, each with `train_s` by then; of the older ones some.
    """

    resumed: int
    began: Instant
    seen: Instant
    spent: Spent
    outcome: str = ""
    course: tuple[tuple[int, float], ...] = ()

    def train_s(self, step: int) -> float:
        """Seconds of training up to a step that it finished; between known steps all take alike."""
        # The first step counts as start.
        known = {self.resumed: 0.0, self.resumed + 1: 0.0, **dict(self.course), self.spent.step: self.spent.train_s}
        points = sorted(known.items())
        after = bisect_right([at for at, _ in points], step)
        if after == len(points):
            return self.spent.train_s
        (first, begin_s), (last, end_s) = points[after - 1], points[after]
        return begin_s + (end_s - begin_s) * (step - first) / (last - first)

    def with_save(self) -> Start:
        """The same, which has saved after its last step."""
        points = tuple(sorted({**dict(self.course), self.spent.step: self.spent.train_s}.items()))
        if len(points) > MOST_POINTS:  # a later start begins near the end; further back every second point will do
            points = (*points[:-EXACT_POINTS:2], *points[-EXACT_POINTS:])
        return replace(self, course=points)


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
    stands = standing(starts)
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


def standing(starts: Sequence[Start]) -> list[int]:
    """Of each start the last step that no later one did again."""
    found, least = [], max((start.spent.step for start in starts), default=0)
    for start in reversed(starts):
        found.append(max(start.resumed, min(start.spent.step, least)))
        least = min(least, start.resumed)
    return found[::-1]


_SHOWN_S = 0.05
"""Rounds to more than nothing."""


def _time(seconds: float) -> str:
    for unit, unit_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.1f} s"
