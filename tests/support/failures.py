"""A job that fails at random, played step by step of its life: what the model of goodput is held against."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from nxtrain.plan.goodput import Failures, Shares


@dataclass
class Job:
    """Plays training, stalls, background writes, failures, detection and restarts on a clock.

    Args:
        costs: What each of them takes.
        interval_s: Training between checkpoints.
        next_failure: Gives the moment of the first failure after a moment at which the job runs.
        start_s: Until it trains for the first time.
    """

    costs: Failures
    interval_s: float
    next_failure: Callable[[float], float]
    start_s: float = 0.0

    def play(self, intervals: int) -> tuple[Shares, int]:
        """Until so many checkpoints are committed; the shares of the time, and how often it failed.

        What the first start takes counts as lost.
        """
        costs = self.costs
        now = detect_s = restart_s = 0.0
        committed = failures = 0
        fails_at = self.next_failure(now)

        def restart() -> None:
            """From a failure to a start that trains, which may take several."""
            nonlocal now, detect_s, restart_s, failures, fails_at
            while True:
                failures += 1
                now = fails_at + costs.detect_s
                detect_s += costs.detect_s
                fails_at = self.next_failure(now)
                restart_s += min(costs.restart_s, fails_at - now)
                if fails_at >= now + costs.restart_s:
                    now += costs.restart_s
                    return

        if fails_at < self.start_s:
            restart()
        else:
            now = self.start_s
        writing_until = None  # of the checkpoint after the last committed one
        while committed < intervals:
            if writing_until is not None:  # trains on meanwhile
                if fails_at < writing_until:
                    writing_until = None
                    restart()
                    continue
                committed += 1
                ready = now + self.interval_s + costs.stall_s
                now = writing_until
                if committed == intervals:
                    break
            else:
                ready = now + self.interval_s + costs.stall_s
            if fails_at < ready:
                writing_until = None
                restart()
                continue
            now = ready
            writing_until = now + costs.write_s
        productive_s, stall_s = intervals * self.interval_s, intervals * costs.stall_s
        lost_s = now - productive_s - stall_s - detect_s - restart_s
        parts = (part / now for part in (productive_s, stall_s, lost_s, detect_s, restart_s))
        return Shares(*parts), failures


def memoryless(mtbf_s: float, seed: int) -> Callable[[float], float]:
    """Failures of a whole job."""
    chance = random.Random(seed)
    return lambda now: now + chance.expovariate(1.0 / mtbf_s)


def nodes(count: int, node_mtbf_s: float, seed: int) -> Callable[[float], float]:
    """Failures of a job of so many nodes, each of which fails by itself, and is mended while nothing runs."""
    chance = random.Random(seed)
    ahead = [chance.expovariate(1.0 / node_mtbf_s) for _ in range(count)]
    heapq.heapify(ahead)

    def following(now: float) -> float:
        while ahead[0] <= now:
            heapq.heapreplace(ahead, max(now, ahead[0]) + chance.expovariate(1.0 / node_mtbf_s))
        return ahead[0]

    return following
