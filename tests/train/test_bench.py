"""The benchmark command measures both sides on a small workload."""

from __future__ import annotations

import json
import subprocess
import sys


def test_bench_train_prints_both_speeds_and_their_ratio() -> None:
    argv = [sys.executable, "-m", "nxtrain", "bench", "train", "--rounds", "1", "--steps", "1", "--batch", "1"]
    argv += ["--seq-len", "32", "--precision", "fp32", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ratio"] == found["nxtrain"]["tokens_per_s"] / found["transformers"]["tokens_per_s"]
    assert 0 < found["nxtrain"]["mfu"] < 1.5
