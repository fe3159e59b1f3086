"""Benchmark of the time that training steps of a fixed duration wait for data from worker processes.

Workers tokenize and pack text, or pack token ids, while a device would compute. A step sleeps in place of computing, so
the workers have all cores, as in a run on an accelerator. The meter of a run's `data_s` counts the wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import product
from typing import Any

from nxtrain.common.process.progress import Progress
from nxtrain.data.arrow.streams import CorpusLanes
from nxtrain.data.loader import Batch, BatchShare
from nxtrain.data.stream_loader import LaneOrder, LaneSource, StreamLoader, num_lanes
from nxtrain.data.workers import WorkerPolicy, Workers
from nxtrain.launch.threads import num_cores
from nxtrain.metrics.work_meter import WorkMeter

TOKENS_PER_S = 1_000_000  # token rate of a node that the loader must serve
MOST_WAITING = 0.01  # largest share of a step that may wait for data

LADDER = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625, 0.03125)
"""Token rates to try, from high to low, as fractions of `TOKENS_PER_S`."""

ROWS = 32
STEPS = 60
WARMUP_STEPS = 10
TIMEOUT_S = 600.0


def measure_wait(sources: Mapping[str, CorpusLanes]) -> dict[str, Any]:
    """Measure the time that steps wait for batches, and the highest token rate without waits, for each corpus.

    Returns:
        `shares`: share of time spent waiting at `tokens_per_s` with `workers`, by corpus. `kept`: highest token rate of
        `LADDER` with a share below `MOST_WAITING`, by corpus and number of workers. A rate of 0 means that none was low
        enough.
    """
    numbers = sorted({1, max(2, num_cores())})
    shares: dict[str, float] = {}
    kept: dict[str, dict[int, float]] = {name: {} for name in sources}
    with Progress("waits for ids", len(sources) * len(numbers)) as progress:
        for done, (name, workers) in enumerate(product(sources, numbers)):
            progress.show(done, f"waits for ids: {name} with {workers} workers")
            shares[name], kept[name][workers] = _kept_rate(sources[name], workers)
    return {"tokens_per_s": TOKENS_PER_S, "workers": numbers[-1], "shares": shares, "kept": kept}


def _kept_rate(source: CorpusLanes, workers: int) -> tuple[float, float]:
    """Share of the time spent waiting at `TOKENS_PER_S`, and the highest rate in tokens per second without waits."""
    with open_batches(source, LaneOrder(num_lanes(ROWS), 0, True), workers) as batches:
        first = share_waiting(batches, source.seq_len / TOKENS_PER_S)
        if first < MOST_WAITING:
            return first, TOKENS_PER_S
        # When steps wait, workers run at full speed: rates far above that speed are not worth a measurement.
        most = 1.25 * (1 - first) * TOKENS_PER_S
        for part in LADDER[1:]:
            rate = part * TOKENS_PER_S
            if rate <= most and share_waiting(batches, source.seq_len / rate) < MOST_WAITING:
                return first, rate
    return first, 0.0


@contextmanager
def open_batches(source: LaneSource, order: LaneOrder, workers: int, rows: int = ROWS) -> Iterator[Iterator[Batch]]:
    """Open an iterator over training batches whose rows are made by worker processes."""
    lanes = partial(Workers, source, order, WorkerPolicy(workers, 0, TIMEOUT_S))
    with closing(StreamLoader(lanes, order.lanes, BatchShare(rows, rows), end_id=0).prefetched(0)) as batches:
        yield batches


def share_waiting(batches: Iterator[Batch], row_s: float, *, steps: int = STEPS) -> float:
    """Share of the time that steps wait for data, if each step takes `row_s` seconds per row."""
    meter = WorkMeter()
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            meter.begin(step)
        meter.enter(step, "data")
        batch = next(batches)
        meter.enter(step, "training")
        time.sleep(batch.targets.shape[0] * batch.targets.shape[1] * row_s)
    spent = meter.measure(WARMUP_STEPS + steps)
    return spent["data_s"] / (spent["data_s"] + spent["training_s"])
