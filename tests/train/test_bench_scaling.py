"""`nxtrain bench scaling` runs real ranks, and what it prints follows from what they measured."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nxtrain.bench.breakdown import COMMUNICATION
from nxtrain.bench.scaling import ONE, TWO


def test_two_ranks_run_in_turn_with_two_independent_runs() -> None:
    argv = [sys.executable, "-m", "nxtrain", "bench", "scaling", "--preset", "tiny", "--layouts", "tp2,pp2", "--json"]
    argv += ["--rounds", "1", "--steps", "1", "--batch", "2", "--seq-len", "32"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [ONE, TWO, "tp2", "pp2"]
    assert set(found["ratios"]) == set(found["cpu_ratios"]) == set(found["breakdown"]) == {"tp2", "pp2"}
    for name in ("tp2", "pp2"):
        assert found["ratios"][name] == pytest.approx(rows[name]["value"] / rows[TWO]["value"])
        assert found["over_one"][name] == pytest.approx(rows[name]["value"] / rows[ONE]["value"])
        cpu = (rows[one]["cpu_s_per_token"]["value"] for one in (TWO, name))
        assert found["cpu_ratios"][name] == pytest.approx(next(cpu) / next(cpu))
        assert 0 < rows[name]["waited"] < 1
        parts = found["breakdown"][name]
        assert parts["sum_s"] == pytest.approx(parts["step_s"], rel=0.05)
        assert parts["kinds"][COMMUNICATION]["calls"] > 0
    assert rows[TWO]["waited"] == 0
