"""Medians over rounds, and ratios inside each round."""

from __future__ import annotations

import pytest

from nxtrain.bench.train import OURS, PEAK, PEER, summarize


def test_a_round_in_which_the_machine_was_slow_changes_no_ratio() -> None:
    measured = {OURS: [1.0, 10.0, 1.0], PEER: [2.0, 20.0, 2.0], PEAK: [8e9, 8e8, 8e9]}
    result = summarize(measured, tokens=1000, flops_per_token=4_000_000)
    assert result["ratios"] == [2.0, 2.0, 2.0]
    assert result[OURS] == {"tokens_per_s": 1000.0, "mfu": pytest.approx(0.5)}
    assert result[PEER] == {"tokens_per_s": 500.0, "mfu": pytest.approx(0.25)}
    assert (result["ratio"], result["peak_flops"]) == (2.0, 8e9)
