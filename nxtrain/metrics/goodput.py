"""Goodput of a run: the productive share of the time since its first start, and the use of the remaining time.

Time in a step is productive if no later start repeats the step. `goodput_meter` measures the time of a start, and
`start_log` stores the measurements in the run folder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from nxtrain.common.process.clock import Instant
from nxtrain.common.text import duration

MOST_POINTS, EXACT_POINTS = 48, 16
"""Maximum number of points (step, training time) of a start, and number of its newest points that are never thinned."""

_SHOWN_S = 0.05
"""Minimum seconds of a part of the time that is shown in the goodput message."""


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of one start of a run by kind of work, up to its last finished step, evaluation or save.

    Args:
        step: Last finished step.
        start_s: Time until the first finished step: imports, data, checkpoint, compilation.
        train_s: Time in the steps after the first.
        stall_s: Time in which training waited for checkpoints.
        eval_s: Time of evaluations.
        saves: Number of committed checkpoints.
        save_stall_s: Time in which training waited for the committed checkpoints, except the wait for the last write.
        save_write_s: Time of writing the committed checkpoints in the background, after staging.
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
        """Seconds from the start of the process to its last progress."""
        return self.start_s + self.train_s + self.eval_s + self.stall_s


@dataclass(frozen=True)
class RunStart:
    """One start of a run, from its launch to its last record.

    Args:
        resumed: Step of the checkpoint from which the start resumed.
        began: Launch of the process.
        seen: Time of the last record.
        spent: Seconds by kind of work.
        outcome: End of the start: `done`, `stopped`, `failed`, `killed`; empty while it runs.
        course: Pairs of a finished step with a save and `train_s` up to this step; older pairs are thinned.
        config: Fingerprint of the configuration.
        why: Message of the error that ended the start; empty if there was none or if the start was killed.
        stop: Signal that asked the start to stop; empty if none did.
    """

    resumed: int
    began: Instant
    seen: Instant
    spent: TimeSpent
    outcome: str = ""
    course: tuple[tuple[int, float], ...] = ()
    config: str = ""
    why: str = ""
    stop: str = ""

    def train_s(self, step: int) -> float:
        """Training seconds of this start up to a finished step; interpolated linearly between recorded steps."""
        # The first step counts as start.
        by_step = {self.resumed: 0.0, self.resumed + 1: 0.0, **dict(self.course), self.spent.step: self.spent.train_s}
        points = sorted(by_step.items())
        after = bisect_right([at for at, _ in points], step)
        if after == len(points):
            return self.spent.train_s
        (first, begin_s), (last, end_s) = points[after - 1], points[after]
        return begin_s + (end_s - begin_s) * (step - first) / (last - first)

    def with_save(self) -> RunStart:
        """Copy of the record with a save after its last step."""
        points = tuple(sorted({**dict(self.course), self.spent.step: self.spent.train_s}.items()))
        if len(points) > MOST_POINTS:  # a later start resumes near the end; of older points every second one is enough
            points = (*points[:-EXACT_POINTS:2], *points[-EXACT_POINTS:])
        return replace(self, course=points)


@dataclass(frozen=True)
class Goodput:
    """Division of the time since a run's first start into parts, in seconds. The parts add up to `wall_s`.

    Args:
        wall_s: Time since the first start, without the time between the end of a finished run and its next start.
        productive_s: Time in steps that no later start repeats; the first step of a start counts as start or restart.
        start_s: Time from the first start to its first finished step.
        lost_steps: Number of steps that a later start had to repeat.
        lost_s: Time in the repeated steps.
        detect_s: Time from the last progress of a failed start to its end, as far as recorded.
        restart_s: Time from the end of a failed start to the first finished step of the next start.
        other_s: Time of a start after its last progress, if it did not fail: the last save, and the shutdown.
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
        """Productive share of the wall time, from 0 to 1."""
        return self.productive_s / self.wall_s if self.wall_s else 0.0

    def record(self) -> dict[str, float]:
        """Goodput as a dict, with the keys by which fault drills are compared."""
        keys = ("lost_steps", "lost_s", "detect_s", "restart_s", "goodput")
        return {key: round(getattr(self, key), 6) for key in keys}

    def __str__(self) -> str:
        """Message with the goodput. Short parts are omitted unless they are about failures."""
        steps = f"{self.lost_steps} step{'s' * (self.lost_steps != 1)}"
        parts = {
            f"lost {steps} ({duration(self.lost_s)})": self.starts > 1,
            f"detection {duration(self.detect_s)}": self.starts > 1,
            f"restart {duration(self.restart_s)}": self.starts > 1,
            f"checkpoints {duration(self.checkpoint_stall_s)}": True,
            f"first start {duration(self.start_s)}": self.start_s >= _SHOWN_S,
            f"evaluation {duration(self.eval_s)}": self.eval_s >= _SHOWN_S,
            f"after the last step {duration(self.other_s)}": self.other_s >= _SHOWN_S,
        }
        return (
            f"goodput {self.goodput:.1%} over {self.starts} start{'s' * (self.starts != 1)}: "
            f"{duration(self.productive_s)} productive of {duration(self.wall_s)}; "
            + ", ".join(part for part, shown in parts.items() if shown)
        )


def account(starts: Sequence[RunStart]) -> Goodput:
    """Compute the goodput from the records of a run's starts."""
    seconds: dict[str, float] = dict.fromkeys((part for part in asdict(Goodput()) if part.endswith("_s")), 0.0)
    lost_steps = 0
    stands = standing(starts)
    for index, (start, stood) in enumerate(zip(starts, stands, strict=True)):
        spent, elapsed_s = start.spent, start.seen.up - start.began.up
        begins = "start_s"
        if index:
            begins = "restart_s"
        seconds["wall_s"] += elapsed_s
        seconds[begins] += spent.start_s
        seconds["checkpoint_stall_s"] += spent.stall_s
        seconds["eval_s"] += spent.eval_s
        productive_s = start.train_s(stood)
        seconds["productive_s"] += productive_s
        seconds["lost_s"] += spent.train_s - productive_s
        lost_steps += spent.step - stood
        tail_s = elapsed_s - spent.total_s
        if spent.step == start.resumed and start.outcome not in {"done", "stopped"}:
            seconds[begins] += tail_s
        elif start.outcome in {"failed", "killed"}:
            seconds["detect_s"] += tail_s
        else:
            seconds["other_s"] += tail_s
        if index and starts[index - 1].outcome != "done":
            gap_s = start.began.since(starts[index - 1].seen)
            seconds["wall_s"] += gap_s
            seconds["restart_s"] += gap_s
    return Goodput(starts=len(starts), lost_steps=lost_steps, **seconds)


def standing(starts: Sequence[RunStart]) -> list[int]:
    """Last step of each start that no later start has repeated."""
    least = max((start.spent.step for start in starts), default=0)
    stands = []
    for start in reversed(starts):
        stands.append(max(start.resumed, min(start.spent.step, least)))
        least = min(least, start.resumed)
    return stands[::-1]
