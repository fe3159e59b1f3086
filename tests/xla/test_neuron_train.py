"""`nxtrain compile` and `nxtrain train` on one core of a pretended Trainium machine, held against transformers.

The backend, its kernels and its graphs are the product's; what is pretended, `tests.support.neuron_machine` lists.
Among that is the hardware's stochastic rounding, in whose place XLA:CPU rounds to the nearest number. A Trainium would
add its random bits, and its own arithmetic.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nxtrain.config.check import Resolved
from tests.support.models import hf_model
from tests.support.neuron_machine import LINK, ROOT, assert_real, install, witnesses
from tests.support.neuron_plugin import PAUSE
from tests.support.parity import OPTIM, batches, check_scalars, layout, reference, rounded_reference

STEPS = 6
SAVED = 3
PLAN = layout("odd", tp=1, micro=2, config={"num_attention_heads": 4, "num_key_value_heads": 2})

CONFIG = """
[run]
name = "real"
dir = "{folder}/run"
[cluster]
instance = "trn1.2xlarge"
[model]
hf = "{folder}/hf"
init = "hf"
[train]
steps = {steps}
seq_len = {seq_len}
global_batch = {global_batch}
micro_batch = {micro_batch}
[optim]
lr = {lr}
schedule = "constant"
clip = {clip}
eps = {eps}
weight_decay = {weight_decay}
[data]
source = "tokens"
path = "{folder}/rows.npy"
shuffle = false
[checkpoint]
every = {every}
[metrics]
log_every = 1
progress = false
tensorboard = false
[backend]
name = "neuron"
[compile]
cache_dir = "{folder}/cache"
manifest = "{folder}/{{name}}.json"
max_recompiles = 0
"""


@dataclass(frozen=True)
class Machine:
    """A pretended machine with one model, its data and a configuration.

    Args:
        folder: What is on it.
        env: The variables of a shell.
    """

    folder: Path
    env: Mapping[str, str]

    @staticmethod
    def furnished(folder: Path, plan: Resolved) -> Machine:
        hf_model(plan).save_pretrained(folder / "hf")
        np.save(folder / "rows.npy", torch.cat(batches(plan, STEPS)).numpy().astype(np.uint16))
        run, numbers = plan.config.train, {name: OPTIM[name] for name in ("lr", "clip", "eps", "weight_decay")}
        shape = {"seq_len": run.seq_len, "global_batch": run.global_batch, "micro_batch": run.micro_batch}
        text = CONFIG.format(folder=folder, steps=STEPS, every=SAVED, **shape, **numbers)
        (folder / "config.toml").write_text(text, encoding="utf-8")
        shell = {**install(folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), PAUSE: "0"}
        return Machine(folder, shell)

    def command(self, *argv: str, **variables: str) -> str:
        """Run a program of nxtrain to its good end, and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", *argv],
            cwd=ROOT,
            env={**self.env, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    def nxtrain(self, command: str, *overrides: str) -> str:
        """Run a command of nxtrain on the configuration."""
        return self.command("nxtrain", command, str(self.folder / "config.toml"), *overrides)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of the metrics file."""
        lines = (self.folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def column(self, key: str) -> list[float]:
        """One number of each record."""
        return [record[key] for record in self.records]

    def resume(self, *overrides: str) -> str:
        """Start again from the checkpoint amid the run."""
        at = self.folder / f"run/checkpoints/step-{SAVED:08d}"
        return self.nxtrain("train", f"checkpoint.resume={at}", *overrides)


def test_what_was_compiled_beforehand_trains_as_transformers_does_and_resumes(tmp_path: Path) -> None:
    machine = Machine.furnished(tmp_path, PLAN)
    machine.nxtrain("compile")
    said = [machine.nxtrain("train", "compile.on_miss=stop")]
    first = machine.records
    want = reference(PLAN, STEPS)
    check_scalars(machine.column("loss"), machine.column("grad_norm"), want)
    assert [record["step"] for record in first] == list(range(1, STEPS + 1))

    said.append(machine.resume("compile.on_miss=stop"))
    kept = ("step", "loss", "grad_norm", "param_norm")
    assert [[record[key] for key in kept] for record in machine.records] == [
        [record[key] for key in kept] for record in first
    ]
    assert "Call compiler" not in "".join(said)
    assert f"resumed from step {SAVED}" in said[1] or f"step-{SAVED:08d}" in said[1], said[1]
    assert_real(tmp_path, processes=3)
    assert not any(each["rounds"] for each in witnesses(tmp_path))


def test_bf16_that_the_hardware_rounds_stays_as_near_to_fp32_as_transformers_in_bf16(tmp_path: Path) -> None:
    machine = Machine.furnished(tmp_path, PLAN)
    rule = ("precision.params=bf16", "precision.update=bf16_stochastic")
    machine.nxtrain("train", *rule)
    first, losses = machine.records, machine.column("loss")
    exact, theirs = (course.losses for course in (reference(PLAN, STEPS), rounded_reference(PLAN, STEPS)))
    errors = [max(abs(a - b) for a, b in zip(found, exact, strict=True)) for found in (losses, theirs)]
    assert 0.0 < errors[0] < 1.5 * errors[1], (errors, losses, theirs, exact)

    machine.resume(*rule)
    kept = ("step", "loss", "grad_norm", "param_norm")
    # On hardware the steps after a resume draw other bits; a plain cast draws none.
    assert [[record[key] for key in kept] for record in machine.records] == [
        [record[key] for key in kept] for record in first
    ]
    assert_real(tmp_path, processes=2)
    assert all(each["rounds"] is True for each in witnesses(tmp_path))


def test_two_ranks_whose_hosts_carry_their_collectives_train_as_transformers_does(tmp_path: Path) -> None:
    plan = layout("gqa2", tp=1, micro=1)
    machine = Machine.furnished(tmp_path, plan)
    agent = ("nxtrain.launch.torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    overrides = ("parallel.tp=1", "parallel.dp=2", "parallel.shard=zero1", "train.steps=4", "compile.max_recompiles=100")
    config = str(tmp_path / "config.toml")
    machine.command(*agent, "-m", "nxtrain", "train", config, *overrides, "checkpoint.every=0", **{LINK: "1"})
    want = reference(plan, 4)
    check_scalars(machine.column("loss"), machine.column("grad_norm"), want)
    assert_real(tmp_path, processes=2)
