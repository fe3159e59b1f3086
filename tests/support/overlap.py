"""Overlap of gradient sums with a rank's computation, from the profiles that `metrics.profile_steps` writes.

A sum that is awaited where it starts overlaps no matrix product of its rank.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.common.run_folder import LOGS_DIR, PROFILES_DIR
from nxtrain.metrics.work_meter import SECTIONS

START, SUM = r"^c10d::allreduce_$", r"^gloo:all_reduce$"
"""Start of a sum, and the sum in one of gloo's threads, which take the sums in the order of their starts."""

PRODUCT = r"^aten::(mm|addmm|bmm|baddbmm)$"

Interval = tuple[float, float]
"""Begin and end in seconds, on the clock that the processes of a machine share."""


@dataclass(frozen=True)
class Profile:
    """Parts of the profiled steps of one rank, each in the order of its beginning.

    Args:
        sums: Sums of gradients that start in a backward pass, from start to completion.
    """

    rank: int
    sections: Sequence[tuple[str, Interval]]
    sums: list[Interval]
    products: Sequence[Interval]

    @property
    def backward(self) -> list[Interval]:
        """Backward passes."""
        return [when for name, when in self.sections if name == "backward"]

    @property
    def products_beside(self) -> int:
        """Number of products of the backward pass that begin while a sum is under way."""
        begins = np.array([begin for begin, _ in self.products])
        return int((is_in(begins, self.sums) & is_in(begins, self.backward)).sum())

    @property
    def overlap(self) -> float:
        """Share of the time of the sums in which the backward pass computes a product."""
        edges = np.unique([*self.sums, *self.products, *self.backward])
        lengths, begins = np.diff(edges), edges[:-1]
        in_sum = is_in(begins, self.sums)
        beside = in_sum & is_in(begins, self.products) & is_in(begins, self.backward)
        return float(lengths[beside].sum() / lengths[in_sum].sum())


def is_in(moments: NDArray[np.float64], intervals: Sequence[Interval]) -> NDArray[np.bool_]:
    """True for each moment that lies in an interval, whose end does not belong to the interval."""
    inside = np.zeros(len(moments), dtype=bool)
    for begin, end in intervals:
        inside |= (begin <= moments) & (moments < end)
    return inside


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
    """Read one profile."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        content = json.load(text)
    base_s = content.get("baseTimeNanoseconds", 0) / 1e9
    spans = []
    for event in content["traceEvents"]:
        if event.get("ph") == "X":
            begin_s = base_s + float(event["ts"]) / 1e6
            spans.append((event["name"], (begin_s, begin_s + float(event["dur"]) / 1e6)))
    spans.sort(key=lambda span: span[1][0])

    def named(pattern: str) -> list[Interval]:
        return [when for name, when in spans if re.search(pattern, name)]

    marks = {f"nxtrain.{section}": section for section in SECTIONS}  # the profiler marks each section of a step
    sections = [(marks[name], when) for name, when in spans if name in marks]
    profile = Profile(int(file.name.split("-")[1]), sections, [], named(PRODUCT))
    starts, ends = named(START), named(SUM)
    in_backward = is_in(np.array([begin for begin, _ in starts]), profile.backward)
    for (begin_s, _), (_, end_s), counts in zip(starts, ends, in_backward, strict=False):
        if counts:
            profile.sums.append((begin_s, end_s))
    if not profile.sums:
        raise DataError(f"{file} has no sum in a backward pass; profile parallel.dp=2 backend.cpu_transport=gloo")
    return profile
