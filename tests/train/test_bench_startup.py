"""`nxtrain bench startup` and `nxtrain bench collectives` run real processes and print what these measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxtrain.common.errors import BackendError
from nxtrain.tools.bench.collectives import GIB, KIB, OPERATIONS
from nxtrain.tools.bench.startup import FIRST_STEP, HELP, PACKAGE, PYTHON, TORCH, first_step


def config(folder: Path) -> Path:
    """A run that reads token ids, so that next to nothing is prepared before its step."""
    rows = np.random.default_rng(0).integers(0, 512, (8, 17)).astype(np.uint16)
    np.save(folder / "rows.npy", rows)
    file = folder / "run.toml"
    file.write_text(
        f"""
[model]
preset = "tiny"

[train]
seq_len = 16
global_batch = 4
micro_batch = 4

[data]
source = "tokens"
path = "{folder / "rows.npy"}"

[checkpoint]
every = 0

[backend]
name = "cpu"
"""
    )
    return file


def bench(*argv: str) -> Any:
    line = [sys.executable, "-m", "nxtrain", "bench", *argv, "--rounds", "1", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_start_takes_cpu_time_and_only_a_first_step_imports_torch(tmp_path: Path) -> None:
    found = bench("startup", "--first-step", str(config(tmp_path)))
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [PYTHON, TORCH, PACKAGE, HELP, FIRST_STEP]
    assert all(row["value"] > 0 and row["cpu_s"]["value"] > 0 for row in rows.values())
    # A command collects less garbage than a bare `import torch`, whose time is that of about one step's start.
    assert found["ratios"][FIRST_STEP] > 0.5 > found["ratios"][HELP]
    assert found["ratios"][HELP] == pytest.approx(rows[HELP]["cpu_s"]["value"] / rows[TORCH]["cpu_s"]["value"])


def test_a_command_that_fails_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[train]\nstepz = 3\n")
    with pytest.raises(BackendError, match="first step ended with exit code 2") as caught:
        first_step(bad)
    assert "train.stepz" in str(caught.value)


def test_collectives_are_measured_at_every_size() -> None:
    found = bench("collectives", "--sizes-kib", "4,256")
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [f"{op}/{kib}" for op in OPERATIONS for kib in (4, 256)]
    for row in rows.values():
        assert row["value"] == pytest.approx(row["kib"] * KIB / GIB / row["wall_s"])
        assert row["cpu_s"] > 0
    assert set(found["latency_s"]) == set(OPERATIONS)
    for op in set(OPERATIONS) - {"copy"}:
        assert found["ratios"][f"{op}/4"] == pytest.approx(rows[f"{op}/4"]["value"] / rows["copy/4"]["value"])
