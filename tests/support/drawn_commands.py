"""Drawn runs through the command line: `nxtrain launch` on a Hugging Face folder and a token file."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nxtrain.common.run_folder import METRICS_FILE
from tests.support.drawn import CONFIG, ROOT, Drawn
from tests.support.drawn_runs import Error, first_weights, wanted
from tests.support.models import hf_model
from tests.support.parity import Course

LIMIT_S = 180


def prepare(drawn: Drawn, folder: Path) -> list[str]:
    """Write the model and the data of a run, and return the command that trains it."""
    drawn = unmasked(drawn)
    hf_model(drawn.resolved, weights=first_weights(drawn)).save_pretrained(folder / "model")
    rows = [torch.cat([inputs, targets[:, -1:]], dim=1) for inputs, targets in drawn.batches()]
    np.save(folder / "rows.npy", torch.cat(rows).numpy().astype(np.uint16))
    shape = [line for line in drawn.overrides if not line.startswith(("model.config.", "model.family=", "data.path="))]
    own = {
        "run.dir": folder / "run",
        "data.path": folder / "rows.npy",
        "model.preset": '""',
        "model.hf": folder / "model",
        "model.init": "hf",
        "train.steps": drawn.steps,
        "metrics.log_every": 1,
        "metrics.progress": "false",
        "metrics.tensorboard": "false",
        "checkpoint.every": 0,
    }
    overrides = [*shape, *(f"{key}={value}" for key, value in own.items())]
    return ["nxtrain", "launch", str(CONFIG.relative_to(ROOT)), *overrides, "--nproc", str(drawn.degrees.world)]


def unmasked(drawn: Drawn) -> Drawn:
    """The same run on data whose targets all count, as token files have them."""
    return replace(drawn, mask=0.0)


def run_command(argv: list[str]) -> None:
    """Run a command of `prepare`.

    Raises:
        AssertionError: The command fails.
    """
    program = [sys.executable, "-m", *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def error_of_command(drawn: Drawn, folder: Path) -> Error:
    """Hold the records of a finished command against the reference."""
    lines = (folder / "run" / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, drawn.steps + 1))
    found = Course([record["loss"] for record in records], [record["grad_norm"] for record in records], {})
    want = wanted(unmasked(drawn))
    loss = max(abs(a - b) for a, b in zip(found.losses, want.losses, strict=True))
    norm = max(abs(a / b - 1) for a, b in zip(found.norms, want.norms, strict=True))
    return Error(loss, norm, 0.0)
