"""Wait for data in steps of a fixed time: workers tokenize and pack, or pack ids, while a device would compute.

The steps sleep, so that the workers have all cores, as beside an accelerator.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from nxtrain.data.arrow.lanes import CorpusLanes
from nxtrain.data.loader import BatchShare
from nxtrain.data.stream_loader import LaneOrder, StreamLoader, num_lanes
from nxtrain.data.workers import WorkerPolicy, Workers

TOKENS_PER_S = 1_000_000
"""Speed of a node that the loader serves."""

ROWS, STEPS, WARMUP_STEPS = 32, 60, 10
TIMEOUT_S = 600.0


def measure_wait(sources: Mapping[str, CorpusLanes]) -> dict[str, Any]:
    """Share of the steps' time that waits for a batch, for each kind of corpus.

    Args:
        sources: Lanes of each corpus, by its name.
    """
    workers = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    shares = {name: _share_waiting(source, workers) for name, source in sources.items()}
    return {"tokens_per_s": TOKENS_PER_S, "workers": workers, "shares": shares}


def _share_waiting(source: CorpusLanes, workers: int) -> float:
    """Share of the time of steps in which a consumer waits."""
    order = LaneOrder(num_lanes(ROWS), 0, True)
    policy = WorkerPolicy(workers, 0, TIMEOUT_S)
    lanes = partial(Workers, source, order, policy)
    loader = StreamLoader(lanes, order.lanes, BatchShare(ROWS, ROWS), end_id=0)
    step_s = ROWS * source.seq_len / TOKENS_PER_S
    waited_s = 0.0
    batches = loader.prefetched(0)
    try:
        for step in range(WARMUP_STEPS + STEPS):
            began = time.perf_counter()
            next(batches)
            waited_s += (time.perf_counter() - began) * (step >= WARMUP_STEPS)
            time.sleep(step_s)
    finally:
        batches.close()
    return waited_s / (waited_s + STEPS * step_s)
