"""`python -OO` removes assertions and docstrings, and changes neither a loss nor a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nxtrain.checkpoint import directory
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from tests.support import commands, runs
from tests.support.runs import course

SHARD = "rank-00000.safetensors"


def test_a_run_saves_and_resumes_without_assertions(tmp_path: Path) -> None:
    plain, optimized = tmp_path / "plain", tmp_path / "optimized"
    for folder in (plain, optimized):
        commands.write_config(folder, steps=4, every=2)
    commands.output_of("train", plain / runs.FILE, "checkpoint.async=false")
    for steps in (2, 4):
        overrides = (f"train.steps={steps}", "optim.decay_steps=4", "checkpoint.strict=true")
        command = [sys.executable, "-OO", "-m", "nxtrain", "train", str(optimized / runs.FILE), *overrides]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
    assert "continues after step 2" in ended.stderr
    assert course(optimized / "run") == course(plain / "run")
    for step in (2, 4):
        files = [directory.step_path(folder / "run" / CHECKPOINTS_DIR, step) / SHARD for folder in (plain, optimized)]
        assert files[0].read_bytes() == files[1].read_bytes()
