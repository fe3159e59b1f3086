"""Spikes of the gradient norm against a brute-force reading of whole series."""

from __future__ import annotations

import json
import math

from hypothesis import example, given
from hypothesis import strategies as st

from nxtrain.metrics.spikes import WINDOW, NormSpikes

NORMS = st.lists(
    st.one_of(st.floats(0.4, 0.6), st.floats(0.4, 0.6), st.floats(0.0, 5.0), st.sampled_from([math.nan, math.inf])),
    max_size=120,
)
THRESHOLD = st.sampled_from([0.0, 0.1, 1.0])


def brute_force(norms: list[float], threshold: float) -> tuple[list[tuple[int, int]], list[float]]:
    """Ended spikes of a series from step 1, and its running means, each computed from the whole series."""
    finite = [(step, norm) for step, norm in enumerate(norms, 1) if math.isfinite(norm)]
    means = [math.fsum(n for _, n in finite[at - WINDOW : at]) / WINDOW for at in range(WINDOW, len(finite) + 1)]
    above = [at >= WINDOW and norm > means[at - WINDOW] + threshold for at, (_, norm) in enumerate(finite)]
    spikes = []
    for at, (step, _) in enumerate(finite):
        if above[at] and not (at and above[at - 1]):
            length = next((far for far in range(len(finite) - at) if not above[at + far]), None)
            if length is not None:
                spikes.append((step, length))
    return spikes, means


@given(norms=NORMS, threshold=THRESHOLD, every=st.integers(1, 130))
def test_spikes_and_means_are_those_of_brute_force_however_often_they_are_taken(
    norms: list[float], threshold: float, every: int
) -> None:
    detector, result = NormSpikes(threshold), list[tuple[int, int]]()
    for step, norm in enumerate(norms, 1):
        detector.see(step, norm)
        result += detector.take() if step % every == 0 else ()
    spikes, means = brute_force(norms, threshold)
    assert result + list(detector.take()) == spikes
    assert detector.mean == (means[-1] if means else None)
    assert detector.lowest == (min(means) if means else None)


LONG_SPIKE = [1.0] * WINDOW + [9.0, 9.0, 9.0, 0.0]


@given(norms=NORMS, threshold=THRESHOLD, saved=st.integers(0, 120))
@example(norms=LONG_SPIKE, threshold=0.1, saved=WINDOW + 2)
def test_a_resumed_detector_goes_on_as_if_it_had_not_stopped(norms: list[float], threshold: float, saved: int) -> None:
    whole, before, after = (NormSpikes(threshold) for _ in range(3))
    for step, norm in enumerate(norms, 1):
        whole.see(step, norm)
        if step <= saved:
            before.see(step, norm)
    after.restore(json.loads(json.dumps(before.state(), allow_nan=False)))
    for step, norm in enumerate(norms[saved:], saved + 1):
        after.see(step, norm)
    assert after.state() == whole.state()
    assert after.take() == whole.take()
