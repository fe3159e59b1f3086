"""`nxtrain bench scaling` runs real ranks, and what it prints follows from what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from nxtrain.tools.bench.breakdown import COMMUNICATION
from nxtrain.tools.bench.scaling import ONE, TWO
from tests.support.ports import patient_s


def test_two_ranks_run_in_turn_with_two_independent_runs(tmp_path: Path) -> None:
    chart = tmp_path / "efficiency.svg"
    argv = [sys.executable, "-m", "nxtrain", "bench", "scaling", "--preset", "tiny", "--layouts", "pp2", "--json"]
    argv += ["--rounds", "1", "--steps", "1", "--batch", "2", "--seq-len", "32", "--chart", str(chart)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patient_s(280), check=False)
    of_others = [line for line in done.stderr.splitlines() if " so far" not in line]
    assert (done.returncode, of_others) == (0, []), "a library prints lines of its own"
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [ONE, TWO, "pp2"]
    assert set(found["ratios"]) == set(found["cpu_ratios"]) == set(found["breakdown"]) == {"pp2"}
    assert found["ratios"]["pp2"] == pytest.approx(rows["pp2"]["value"] / rows[TWO]["value"])
    assert found["over_one"]["pp2"] == pytest.approx(rows["pp2"]["value"] / rows[ONE]["value"])
    cpu = (rows[one]["cpu_s_per_token"]["value"] for one in (TWO, "pp2"))
    assert found["cpu_ratios"]["pp2"] == pytest.approx(next(cpu) / next(cpu))
    assert 0 < rows["pp2"]["waited"] < 1
    parts = found["breakdown"]["pp2"]
    assert parts["sum_s"] == pytest.approx(parts["step_s"], rel=0.05)
    assert parts["kinds"][COMMUNICATION]["calls"] > 0
    assert rows[TWO]["waited"] == 0
    texts = [text.text for text in ET.fromstring(chart.read_text(encoding="utf-8")).findall("{*}text")]
    assert texts[2:] == ["pp2", f"{found['ratios']['pp2']:.2f}"]
