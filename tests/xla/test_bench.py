"""The benchmark of what PyTorch/XLA costs the host, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nxtrain.bench.train import OURS, PEER
from nxtrain.bench.xla import TRACE, summarize


def test_a_step_costs_the_host_no_more_than_one_of_transformers() -> None:
    argv = [sys.executable, "-m", "nxtrain", "bench", "xla", "--layers", "2", "--rounds", "3", "--steps", "3", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ratio"] >= 1.0, found
    assert 0 < found["trace_s_per_rank"] < 60


def test_a_round_in_which_the_machine_was_slow_changes_no_ratio() -> None:
    found = summarize({OURS: [0.1, 1.0, 0.1], PEER: [0.2, 2.0, 0.2], TRACE: [1.0, 9.0, 2.0]})
    assert found["ratios"] == [2.0, 2.0, 2.0]
    assert found[OURS]["host_ms_per_step"] == pytest.approx(100)
    assert found["trace_s_per_rank"] == 2.0
