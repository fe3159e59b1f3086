"""`nxtrain bench collectives` runs real processes and prints what these measured."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nxtrain.tools.bench.collectives import GIB, KIB, OPERATIONS
from tests.support.ports import patient_s


def test_collectives_are_measured_at_every_size() -> None:
    argv = [sys.executable, "-m", "nxtrain", "bench", "collectives", "--sizes-kib", "4,256", "--rounds", "1", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patient_s(280), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [f"{op}/{kib}" for op in OPERATIONS for kib in (4, 256)]
    for row in rows.values():
        assert row["value"] == pytest.approx(row["kib"] * KIB / GIB / row["wall_s"])
        assert row["cpu_s"] > 0
    assert set(found["latency_s"]) == set(OPERATIONS)
    for op in set(OPERATIONS) - {"copy"}:
        assert found["ratios"][f"{op}/4"] == pytest.approx(rows[f"{op}/4"]["value"] / rows["copy/4"]["value"])
