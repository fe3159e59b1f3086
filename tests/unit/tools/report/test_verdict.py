"""Verdicts on drawn times: each limit is named exactly where its rule says so, with its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.metrics.status import KINDS_S
from nxtrain.tools.report.verdict import (
    BOUND_BY,
    BOUND_SHARE,
    HIGH_MFU,
    LAUNCH_SHARE,
    UNDECIDED,
    UPDATE_SHARE,
    verdict,
)

PARTS = st.integers(0, 100)
TIMES = st.fixed_dictionaries(dict.fromkeys(KINDS_S, PARTS)).filter(lambda times: sum(times.values()) > 0)


def test_without_times_there_is_none() -> None:
    assert verdict({}) == verdict(dict.fromkeys(KINDS_S, 0.0)) == ""


@given(TIMES, PARTS, PARTS, st.sampled_from([None, 0.1, 0.5]), st.sampled_from([None, 0.5, 2.0]), st.booleans())
def test_the_first_rule_that_holds_decides(
    parts: dict[str, int], reduce: int, update: int, mfu: float | None, ratio: float | None, queues: bool
) -> None:
    """Sections are parts of the step; the order of the rules is data, communication, other work, then the step."""
    step, total = parts["training_s"], sum(parts.values())
    times = {**parts, "reduce_s": step * reduce / 200, "optimizer_s": step * update / 200}
    communication = (times["waiting_s"] + times["reduce_s"] if times["waiting_s"] else 0.0) / total
    rules = [
        ("data-bound", times["data_s"] / total >= BOUND_SHARE),
        ("communication-bound", communication >= BOUND_SHARE),
        ("other", max(times[key] for key in BOUND_BY) / total >= BOUND_SHARE),
        ("launch-bound", queues and step / total >= LAUNCH_SHARE),
        ("memory-bound", times["optimizer_s"] / total >= UPDATE_SHARE or (ratio is not None and ratio < 1)),
        ("compute-bound", ratio is not None or (mfu or 0.0) >= HIGH_MFU),
        (UNDECIDED, True),
    ]
    expected = next(name for name, holds in rules if holds)
    name, _, why = verdict(
        {key: value / 7 for key, value in times.items()},
        mfu=mfu,
        intensities=None if ratio is None else (100.0, 100.0 * ratio),
        queues=queues,
    ).partition(": ")
    if expected == "other":
        worst = max(BOUND_BY, key=lambda key: times[key])
        assert name == BOUND_BY[worst][0]
        assert f"{times[worst] / total:.0%} of the time" in why
    else:
        assert name == expected
    if expected == "data-bound":
        assert f"{times['data_s'] / total:.0%} of the time" in why


@pytest.mark.parametrize(("waiting", "limit"), [(0.0, "memory-bound"), (0.2, "communication-bound")])
def test_a_lone_rank_reduces_nothing(waiting: float, limit: str) -> None:
    result = verdict({"training_s": 1.0, "reduce_s": 0.3, "optimizer_s": 0.4, "waiting_s": waiting})
    assert result.startswith(f"{limit}: ")
