"""Medians over rounds, and ratios inside each round."""

from __future__ import annotations

import pytest

from nxtrain.tools.bench.optim import PEER, summarize


def test_a_round_in_which_the_machine_was_slow_changes_no_ratio() -> None:
    seconds = {PEER: [1e-3, 1e-2, 1e-3], "ours": [2e-3, 2e-2, 2e-3]}
    result = summarize(seconds, num_params=1_000_000, bytes_per_param={PEER: 12.0, "ours": 10.0})
    assert result["ours"] == pytest.approx({"ns_per_param": 2.0, "ratio": 2.0, "bytes_per_param": 10.0})
    assert result[PEER]["ratio"] == 1.0
