"""How much of a run's time failures cost before they happen, and which checkpoint interval costs least.

Failures come at random, at a rate that does not change (exponential times between them), also while a start loads; not
while nobody has noticed yet that the run is gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nxtrain.metrics.goodput import Start

ASSUMED_MTBF_S = 86_400.0
"""One failure a day, where a run has not shown another rate."""

FAR = 3.0
"""Factor between two intervals beyond which the difference is told."""

WORTH_TELLING = 1e-3
"""Of a run's time."""


@dataclass(frozen=True)
class Shares:
    """Where the time of a run goes, as shares of all; they add up to 1.

    Args:
        goodput: Steps that stand.
        stall: Waiting for checkpoints that were committed.
        lost: Work since the last committed checkpoint, done again.
        detect: Until a failure is noticed.
        restart: From there to the first step.
    """

    goodput: float
    stall: float
    lost: float
    detect: float
    restart: float


@dataclass(frozen=True, kw_only=True)
class Failures:
    """A run that fails now and then, and what it does about it.

    Args:
        mtbf_s: Mean time between failures of the whole run.
        stall_s: Training waits so long for each checkpoint.
        write_s: From there until it is committed, while training goes on; it counts only then.
        detect_s: From a failure until it is noticed; of a run started by hand, until somebody acts.
        restart_s: From there to the first step.
    """

    mtbf_s: float
    stall_s: float
    write_s: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.mtbf_s > 0, "a run that always fails has no goodput"
        assert min(self.stall_s, self.write_s, self.detect_s, self.restart_s) >= 0, "time runs one way"

    def wall_s(self, interval_s: float) -> float:
        """Expected seconds from one commit to the next.

        The first attempt lasts `interval_s + stall_s`; one after a failure also repeats what was trained while the last
        checkpoint was written. Summed over attempts, that lag is as if every restart took `write_s` longer.

        Args:
            interval_s: Training between checkpoints; at least `write_s`, since one that falls into the writing of the
                one before is left out.

        Source: Daly 2006 (Future Generation Computer Systems 22, 303-312) for the exponential model, whose downtime
        may fail too; Bougeret et al. 2011 (SC'11, Checkpointing strategies for parallel jobs) for one that cannot.
        """
        assert interval_s > 0, "something is trained between checkpoints"
        assert interval_s >= self.write_s, "the one before is still being written"
        mtbf_s = self.mtbf_s
        again = math.exp((self.restart_s + self.write_s) / mtbf_s)
        return (mtbf_s + self.detect_s) * again * math.expm1((interval_s + self.stall_s) / mtbf_s)

    def shares(self, interval_s: float) -> Shares:
        """Where the time goes with a checkpoint after every so many seconds of training."""
        wall_s = self.wall_s(interval_s)
        goodput, stall = interval_s / wall_s, self.stall_s / wall_s
        detect = self.detect_s / (self.mtbf_s + self.detect_s)
        restart = self.mtbf_s / (self.mtbf_s + self.detect_s) * -math.expm1(-self.restart_s / self.mtbf_s)
        return Shares(goodput, stall, 1.0 - goodput - stall - detect - restart, detect, restart)

    def run_s(self, work_s: float, interval_s: float, start_s: float) -> float:
        """Expected seconds of a run that ends, from its first start until its last checkpoint is committed.

        The first commit comes after a start, which may fail as any other, and has none before it; from there on it is
        `wall_s` each.

        Args:
            work_s: Training that is to be done; at least an interval.
            interval_s: Of it, between checkpoints.
            start_s: From the first start to the first step.

        Source: the model of `wall_s`, with a first attempt of another length a: it takes M (1 - exp(-a/M)) in the mean,
            and if it fails, detection and as many attempts of the usual length follow as it takes.
        """
        assert work_s >= interval_s, "a run has an interval"
        mtbf_s, saved_s = self.mtbf_s, interval_s + self.stall_s + self.write_s
        fails = -math.expm1(-(start_s + saved_s) / mtbf_s)
        first_s = (mtbf_s + self.detect_s) * fails * math.exp((self.restart_s + saved_s) / mtbf_s)
        return first_s + (work_s / interval_s - 1.0) * self.wall_s(interval_s)

    def best_interval_s(self) -> float:
        """The seconds of training between checkpoints that lose least; for small stalls about sqrt(2 * stall * mtbf).

        Only the stall and the rate of failures matter: what follows a failure costs the same whatever the interval is.

        Source: the zero of the derivative of Daly's model; Young 1974 (Communications of the ACM 17, 530-531) for the
        square root.
        """
        low, high = 0.0, 1.0  # in units of mtbf_s
        while (middle := (low + high) / 2) not in {low, high}:
            rises = math.log1p(-middle) + middle + self.stall_s / self.mtbf_s > 0
            low, high = (middle, high) if rises else (low, middle)
        return max(high * self.mtbf_s, self.write_s)

    def best_every(self, step_s: float) -> int:
        """The same in steps, as `checkpoint.every` takes them."""
        return max(1, math.ceil(self.write_s / step_s), round(self.best_interval_s() / step_s))


def advice(starts: Sequence[Start], every: int) -> str:
    """What a run could gain by another `checkpoint.every`, in one line; empty unless that is much, or if it is short.

    Args:
        starts: What the run has spent.
        every: Its steps between checkpoints.
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
    if max(best, every) < FAR * min(best, every) or every * step_s < costs.write_s or steps < best:
        return ""
    present, proposed = (costs.shares(steps * step_s) for steps in (every, best))
    if proposed.goodput - present.goodput < WORTH_TELLING:
        return ""
    return (
        f"checkpoint.every={every} costs {present.stall:.2%} in stalls and {present.lost:.2%} in work done again, at "
        f"one failure a day; checkpoint.every={best} would lose least, {proposed.stall + proposed.lost:.2%} in all"
    )
