"""Prediction of the time that failures cost a run, and of the best checkpoint interval.

Failures occur at random at a constant rate (exponential times between failures), also while a start loads. No further
failure occurs between a failure and its detection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nxtrain.metrics.goodput import RunStart

ASSUMED_MTBF_S = 86_400.0
"""Assumed mean time between failures in seconds, for a run that has shown no other rate: one day."""

MIN_RATIO = 3.0
"""Least ratio between the current and the best checkpoint interval for which advice is printed."""

MIN_GAIN = 1e-3
"""Least gain in goodput, as a share of the run's time, for which advice on the interval is printed."""


@dataclass(frozen=True)
class Shares:
    """Shares of a run's time by use, which add up to 1.

    Args:
        goodput: Training whose results are kept.
        stall: Waiting for checkpoints that were committed.
        lost: Training since the last committed checkpoint, repeated after a failure.
        detect: Time until a failure is noticed.
        restart: Time from the detection to the first step.
    """

    goodput: float
    stall: float
    lost: float
    detect: float
    restart: float


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failure rate of a run, and the costs of its checkpoints and restarts.

    Args:
        mtbf_s: Mean time between failures of the whole run.
        stall_s: Time that training waits for each checkpoint.
        write_s: Time from the end of the stall to the commit, while training continues. The checkpoint counts from the
            commit.
        detect_s: Time from a failure to its detection; for a run started by hand, until a person acts.
        restart_s: Time from the detection to the first step.
    """

    mtbf_s: float
    stall_s: float
    write_s: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.mtbf_s > 0, "mtbf_s must be positive"
        assert min(self.stall_s, self.write_s, self.detect_s, self.restart_s) >= 0, "times must not be negative"

    def wall_s(self, interval_s: float) -> float:
        """Expected seconds from one checkpoint commit to the next; infinite if failures leave no time for an interval.

        The first attempt takes `interval_s + stall_s`. An attempt after a failure also repeats the training done while
        the last checkpoint was written. Summed over attempts, this repetition is as if every restart took `write_s`
        longer.

        Args:
            interval_s: Seconds of training between checkpoints. It is at least `write_s`, since no checkpoint starts
                while the one before is written.

        Source: Daly 2006 (Future Generation Computer Systems 22, 303-312) for the exponential model, whose downtime may
        fail too; Bougeret et al. 2011 (SC'11, Checkpointing strategies for parallel jobs) for downtime that cannot
        fail.
        """
        assert interval_s > 0, "interval_s must be positive"
        assert interval_s >= self.write_s, "interval_s must be at least write_s"
        mtbf_s = self.mtbf_s
        try:
            again = math.exp((self.restart_s + self.write_s) / mtbf_s)
            return (mtbf_s + self.detect_s) * again * math.expm1((interval_s + self.stall_s) / mtbf_s)
        except OverflowError:
            return math.inf

    def shares(self, interval_s: float) -> Shares:
        """Shares of a run's time by use, if a checkpoint follows every `interval_s` seconds of training."""
        wall_s = self.wall_s(interval_s)
        goodput, stall = interval_s / wall_s, self.stall_s / wall_s
        detect = self.detect_s / (self.mtbf_s + self.detect_s)
        restart = self.mtbf_s / (self.mtbf_s + self.detect_s) * -math.expm1(-self.restart_s / self.mtbf_s)
        return Shares(goodput, stall, 1.0 - goodput - stall - detect - restart, detect, restart)

    def run_s(self, work_s: float, interval_s: float, start_s: float) -> float:
        """Expected seconds of a whole run with failures, from its first start until its last checkpoint is committed.

        The first commit follows the first start, which may fail like any other, and no commit precedes it. Each later
        commit takes `wall_s`.

        Args:
            work_s: Seconds of training to do; at least an interval.
            interval_s: Seconds of training between checkpoints.
            start_s: Time from the first start to the first step.

        Source: the model of `wall_s` with a first attempt of another length a. The attempt takes M (1 - exp(-a/M)) on
        average. If it fails, detection and attempts of the usual length follow until one succeeds.
        """
        assert work_s >= interval_s, "work_s must be at least interval_s"
        mtbf_s, saved_s = self.mtbf_s, interval_s + self.stall_s + self.write_s
        fails = -math.expm1(-(start_s + saved_s) / mtbf_s)
        first_s = (mtbf_s + self.detect_s) * fails * math.exp((self.restart_s + saved_s) / mtbf_s)
        return first_s + (work_s / interval_s - 1.0) * self.wall_s(interval_s)

    def best_interval_s(self) -> float:
        """Seconds of training between checkpoints that cost least time; for small stalls about sqrt(2 * stall * mtbf).

        Only the stall and the failure rate matter, since the cost after a failure does not depend on the interval.

        Source: the zero of the derivative of Daly's model; Young 1974 (Communications of the ACM 17, 530-531) for the
        square root.
        """
        low, high = 0.0, 1.0  # in units of mtbf_s
        middle = (low + high) / 2
        while middle not in {low, high}:
            if math.log1p(-middle) + middle + self.stall_s / self.mtbf_s > 0:
                low = middle
            else:
                high = middle
            middle = (low + high) / 2
        return max(high * self.mtbf_s, self.write_s)

    def best_every(self, step_s: float) -> int:
        """Best checkpoint interval in steps, the unit of `checkpoint.every`."""
        return max(1, math.ceil(self.write_s / step_s), round(self.best_interval_s() / step_s))


def advice(starts: Sequence[RunStart], every: int) -> str:
    """Advice on `checkpoint.every` in one line; empty if the gain is small or the run is short.

    Args:
        starts: Starts of the run, with the time that each start spent by use.
        every: Current number of steps between checkpoints.
    """
    spent = [start.spent for start in starts]
    saves = sum(one.saves for one in spent)
    steps = sum(max(0, start.spent.step - start.resumed - 1) for start in starts)
    train_s = sum(one.train_s for one in spent)
    if not (every and saves and steps and train_s):
        return ""
    step_s = train_s / steps
    costs = Failures(
        mtbf_s=ASSUMED_MTBF_S,
        stall_s=sum(one.save_stall_s for one in spent) / saves,
        write_s=sum(one.save_write_s for one in spent) / saves,
    )
    best = costs.best_every(step_s)
    if max(best, every) < MIN_RATIO * min(best, every) or every * step_s < costs.write_s or steps < best:
        return ""
    present, proposed = (costs.shares(steps * step_s) for steps in (every, best))
    if proposed.goodput - present.goodput < MIN_GAIN:
        return ""
    return (
        f"checkpoint.every={every} costs {present.stall:.2%} in stalls and {present.lost:.2%} in work done again, at "
        f"one failure a day; checkpoint.every={best} would lose least, {proposed.stall + proposed.lost:.2%} in all"
    )
