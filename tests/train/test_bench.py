"""The benchmark commands measure both sides on a small workload."""

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


def test_bench_optim_holds_stochastic_rounding_to_three_times_the_fused_update_of_torch() -> None:
    argv = [sys.executable, "-m", "nxtrain", "bench", "optim", "--layers", "1", "--rounds", "9", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    rules = json.loads(done.stdout)["rules"]
    assert rules["bf16_stochastic"]["ratio"] <= 3.0
    assert {name: round(rule["bytes_per_param"]) for name, rule in rules.items()} == {
        "torch.optim.AdamW(fused=True)": 12,
        "fp32": 12,
        "fp32_master": 14,
        "bf16_stochastic": 10,
        "bf16_stochastic, bf16 state": 6,
        "bf16_kahan": 12,
        "bf16_kahan, bf16 state": 8,
    }
