"""Speeds of collectives by the slowest rank, and repetitions by size."""

from __future__ import annotations

from typing import Any

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.tools.bench.collectives import (
    GIB,
    KIB,
    LEAST_REPEATS,
    MOST_REPEATS,
    CollectivesJob,
    bench_collectives,
    summarize,
)


def rank(all_reduce_s: float, copy_s: float) -> dict[str, Any]:
    return {
        "all_reduce": {"4": {"wall": all_reduce_s, "cpu": 1.0}},
        "copy": {"4": {"wall": copy_s, "cpu": 0.5}},
    }


def test_the_slowest_rank_counts_and_ratios_are_inside_rounds() -> None:
    turns = [[rank(1.0, 0.5), rank(2.0, 0.5)], [rank(20.0, 5.0), rank(10.0, 5.0)], [rank(4.0, 1.0), rank(1.0, 1.0)]]
    result = summarize(turns)
    assert result["ratios"] == {"all_reduce/4": 0.25}
    row = result["rows"][0]
    assert row["rounds"] == pytest.approx([4 * KIB / GIB / seconds for seconds in (2.0, 20.0, 4.0)])
    assert (row["wall_s"], row["cpu_s"]) == (4.0, 2.0)
    assert result["latency_s"] == {"all_reduce": 4.0, "copy": 1.0}


def test_small_tensors_are_repeated_and_great_ones_not_only_once() -> None:
    job = CollectivesJob(2, [4])
    assert (job.repeats(4), job.repeats(16 << 10), job.repeats(1 << 20)) == (MOST_REPEATS, 4, LEAST_REPEATS)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (CollectivesJob(2, [4, 0]), "0: each size in KiB must divide evenly into 2 ranks"),
        (CollectivesJob(6, [4]), "4: each size in KiB must divide evenly into 6 ranks"),
        (CollectivesJob(2, []), "no size"),
        (CollectivesJob(3, [3]), "3 ranks are an odd number"),
    ],
)
def test_sizes_and_ranks_that_cannot_be_are_refused(job: CollectivesJob, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_collectives(job=job, rounds=1, as_json=True)
