"""Overlap of gradient sums with a rank's computation, from the profiles that `metrics.profile_steps` writes.

A sum that is awaited where it starts overlaps no matrix product of its rank.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from nxtrain.common.errors import DataError
from nxtrain.common.run_folder import LOGS_DIR, PROFILES_DIR
from nxtrain.metrics.work_meter import SECTIONS

BACKWARD = "backward"

_START, _SUM = re.compile(r"^c10d::allreduce_$"), re.compile(r"^gloo:all_reduce$")
"""Start of a sum, and the sum in one of gloo's threads, which take the sums in the order of their starts."""

_PRODUCT = re.compile(r"^aten::(mm|addmm|bmm|baddbmm)$")


@dataclass(frozen=True)
class Interval:
    """Time from one moment to another.

    Args:
        begin_s, end_s: Seconds on the clock that the processes of a machine share.
    """

    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Profile:
    """Parts of the profiled steps of one rank, each in the order of its begin.

    Args:
        sums: Sums of gradients that start in a backward pass, from start to completion.
    """

    rank: int
    sections: Sequence[tuple[str, Interval]]
    sums: Sequence[Interval]
    products: Sequence[Interval]

    @property
    def products_beside(self) -> int:
        """Number of products of the backward pass that begin while a sum is under way."""
        begins_s = [product.begin_s for product in self.products]
        return sum(_is_in(begin_s, self.sums) and _is_in(begin_s, self.backward) for begin_s in begins_s)

    @property
    def overlap(self) -> float:
        """Share of the time of the sums in which the backward pass computes a product."""
        sums = union(self.sums)
        beside = common(common(sums, union(self.products)), union(self.backward))
        return length_s(beside) / length_s(sums)

    @property
    def backward(self) -> list[Interval]:
        """Backward passes."""
        return [when for name, when in self.sections if name == BACKWARD]


def read_profiles(run: Path) -> list[Profile]:
    """Profiles of all profiled ranks of a run.

    Raises:
        DataError: The run has no profile, or a profile has no sum in a backward pass.
    """
    files = sorted((run / LOGS_DIR / PROFILES_DIR).glob("rank-*.json.gz"))
    if not files:
        raise DataError(f"{run} has no profile; train with metrics.profile_steps=[3,3] metrics.profile_ranks=[0,1]")
    return [read(file) for file in files]


def read(file: Path) -> Profile:
    """Read one profile.

    Raises:
        DataError: It has no sum of gradients in a backward pass.
    """
    with gzip.open(file, "rt", encoding="utf-8") as text:
        content = json.load(text)
    base_s = content.get("baseTimeNanoseconds", 0) / 1e9
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: float(event["ts"]))

    def named(pattern: str | re.Pattern[str]) -> list[tuple[str, Interval]]:
        intervals = []
        for event in events:
            if re.search(pattern, event["name"]):
                begin_s = base_s + float(event["ts"]) / 1e6
                intervals.append((event["name"], Interval(begin_s, begin_s + float(event["dur"]) / 1e6)))
        return intervals

    # The profiler marks each section of a step.
    sections = [(name.removeprefix("nxtrain."), when) for name, when in named(rf"^nxtrain\.({'|'.join(SECTIONS)})$")]
    backward = [when for name, when in sections if name == BACKWARD]
    profile = Profile(
        int(file.name.split("-")[1]),
        sections,
        [
            Interval(start.begin_s, done.end_s)
            for (_, start), (_, done) in zip(named(_START), named(_SUM), strict=False)
            if _is_in(start.begin_s, backward)
        ],
        [when for _, when in named(_PRODUCT)],
    )
    if not profile.sums:
        raise DataError(f"{file} has no sum in a backward pass; profile parallel.dp=2 backend.cpu_transport=gloo")
    return profile


def _is_in(moment_s: float, intervals: Iterable[Interval]) -> bool:
    return any(interval.begin_s <= moment_s < interval.end_s for interval in intervals)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals, as ascending intervals that do not overlap."""
    merged: list[Interval] = []
    for interval in sorted(intervals, key=lambda interval: interval.begin_s):
        if merged and interval.begin_s <= merged[-1].end_s:
            merged[-1] = Interval(merged[-1].begin_s, max(merged[-1].end_s, interval.end_s))
        else:
            merged.append(interval)
    return merged


def common(these: Iterable[Interval], those: Iterable[Interval]) -> list[Interval]:
    """Intersection of two unions of intervals."""
    intervals = []
    for a, b in product(these, those):
        begin_s, end_s = max(a.begin_s, b.begin_s), min(a.end_s, b.end_s)
        if begin_s < end_s:
            intervals.append(Interval(begin_s, end_s))
    return intervals


def length_s(intervals: Iterable[Interval]) -> float:
    """Total seconds of a union of intervals."""
    return sum(interval.end_s - interval.begin_s for interval in intervals)
