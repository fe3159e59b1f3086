"""Detection of stragglers: ranks that are slower than their peers, by the host seconds of their own work."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

from nxtrain.common.distributed.heartbeats import Beat
from nxtrain.metrics.work_meter import SAME_WORK

FACTOR = 1.5
MARGIN_S = 0.010
"""Seconds per step by which ranks on equal machines differ without counting as slow."""
STEPS = 10
"""Smallest number of steps over which the speed of ranks is compared."""


class Stragglers:
    """Detector of slow ranks from the heartbeats of all ranks; each change is reported once.

    Args:
        stages: Pipeline stage of each rank; only ranks of the same stage have equal work.

    Attributes:
        rates: Seconds per step of each rank by kind of work, over the last steps.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self._peers: dict[int, list[int]] = defaultdict(list)
        for rank, stage in enumerate(stages):
            self._peers[stage].append(rank)
        self._seen: dict[int, deque[Beat]] = defaultdict(deque)
        self._slow: set[int] = set()
        self.rates: Mapping[int, Mapping[str, float]] = {}

    def changes(self, beats: Mapping[int, Beat]) -> Iterator[str]:
        """Read the newest heartbeats, and yield a message for each rank that became slow or recovered."""
        rates: dict[int, Mapping[str, float]] = {}
        for rank, beat in beats.items():
            rate = self._rate(rank, beat)
            if rate:
                rates[rank] = rate
        self.rates = rates
        for ranks in self._peers.values():
            if len(ranks) > 1 and all(rank in rates for rank in ranks):
                same_work: dict[int, dict[str, float]] = {}
                for rank in ranks:  # seconds of sections if the rank has them, else of the whole step
                    same_work[rank] = {kind: rates[rank][kind] for kind in SAME_WORK if kind in rates[rank]}
                yield from self._compare(same_work)

    def _compare(self, rates: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
        usual = median_low([sum(rate.values()) for rate in rates.values()])
        for rank, rate in rates.items():
            # Hysteresis: a slow rank must come nearer to the others before it counts as recovered.
            share = 0.5 if rank in self._slow else 1.0
            slow = sum(rate.values()) - usual > share * max((FACTOR - 1) * usual, MARGIN_S)
            if slow and rank not in self._slow:
                self._slow.add(rank)
                medians: dict[str, float] = {}
                for name in rate:
                    medians[name] = median_low([other.get(name, 0.0) for other in rates.values()])
                worst = max(rate, key=lambda name: rate[name] - medians[name])
                yield (
                    f"rank {rank} is slow: {1e3 * rate[worst]:.0f} ms per step in {worst}, where the median is "
                    f"{1e3 * medians[worst]:.0f} ms"
                )
            elif not slow and rank in self._slow:
                self._slow.remove(rank)
                yield f"rank {rank} is as fast as the others again"

    def _rate(self, rank: int, beat: Beat) -> dict[str, float]:
        """Seconds per step of a rank in each section, over the last steps; empty if there are too few steps."""
        if not beat.spent:  # before the first step, whose number a resumed run sets
            return {}
        seen = self._seen[rank]
        seen.append(beat)
        while len(seen) > 1 and beat.counted - seen[1].counted >= STEPS:
            seen.popleft()
        steps = beat.counted - seen[0].counted
        if steps < STEPS:
            return {}
        return {name: (spent - seen[0].spent.get(name, 0.0)) / steps for name, spent in beat.spent.items()}
