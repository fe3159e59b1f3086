"""Time that intervals have in common, and what a profile without sums of gradients says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.common.errors import DataError
from nxtrain.common.run_folder import LOGS_DIR, PROFILES_DIR
from tests.support.overlap import Profile, read_profiles

INTERVALS = st.lists(
    st.builds(lambda begin, length: (float(begin), float(begin + length)), st.integers(0, 30), st.integers(1, 9)),
    min_size=1,
)


def seconds(intervals: list[tuple[float, float]]) -> set[int]:
    return {second for begin, end in intervals for second in range(int(begin), int(end))}


@given(sums=INTERVALS, products=INTERVALS, backward=INTERVALS)
def test_the_overlap_has_the_seconds_of_all_intervals(
    sums: list[tuple[float, float]], products: list[tuple[float, float]], backward: list[tuple[float, float]]
) -> None:
    profile = Profile(0, [("backward", when) for when in backward], sums, products)
    beside = seconds(sums) & seconds(products) & seconds(backward)
    assert profile.overlap == pytest.approx(len(beside) / len(seconds(sums)))


def write_profile(run: Path, *events: tuple[str, float, float]) -> None:
    """Profile of rank 3 with spans of these names, begins and ends in seconds."""
    spans: list[dict[str, Any]] = [
        {"ph": "X", "name": name, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)} for name, begin, end in events
    ]
    folder = run / LOGS_DIR / PROFILES_DIR
    folder.mkdir(parents=True)
    with gzip.open(folder / "rank-00003-steps-4-4.json.gz", "wt", encoding="utf-8") as file:
        json.dump({"baseTimeNanoseconds": 10**10, "traceEvents": [{"ph": "M", "name": "process_name"}, *spans]}, file)


STEP = (("nxtrain.training", 0, 9), ("nxtrain.forward", 0, 2), ("nxtrain.backward", 2, 6), ("nxtrain.reduce", 6, 8))


def test_a_profile_has_the_sums_of_its_backward_pass(tmp_path: Path) -> None:
    starts = (("c10d::allreduce_", 3, 3.1), ("c10d::allreduce_", 6.2, 6.3))
    sums = (("gloo:all_reduce", 3.5, 7), ("gloo:all_reduce", 6.5, 7.5), ("gloo:barrier", 3, 4), *starts)
    write_profile(tmp_path, ("aten::mm", 1, 3.5), ("aten::mm", 4, 5), ("aten::mul", 5, 6), *sums, *STEP)
    (profile,) = read_profiles(tmp_path)
    assert profile.rank == 3
    assert profile.sections == [(n.removeprefix("nxtrain."), (10.0 + b, 10.0 + e)) for n, b, e in STEP[1:]]
    assert profile.sums == [(13.0, 17.0)]
    assert profile.products_beside == 1
    assert profile.overlap == pytest.approx(1.5 / 4)


def test_a_run_without_sums_in_its_backward_pass_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no profile; train with metrics\.profile_steps"):
        read_profiles(tmp_path)
    write_profile(tmp_path, *STEP, ("c10d::allreduce_", 6.4, 6.5), ("gloo:all_reduce", 6.5, 7.5))
    with pytest.raises(DataError, match="no sum in a backward pass"):
        read_profiles(tmp_path)
