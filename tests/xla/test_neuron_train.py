"""`nxtrain compile` and `nxtrain train` on one core of a pretended Trainium machine, held against transformers.

The backend, its kernels and its graphs are the product's; what is pretended, `tests.support.neuron_machine` lists.
Among that is the hardware's stochastic rounding, in whose place XLA:CPU rounds to the nearest number. A Trainium would
add its random bits, and its own arithmetic.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from nxtrain.config.check import Resolved
from tests.support import ROOT, neuron_machine
from tests.support.models import changed, hf_model
from tests.support.neuron_machine import LINK, NXD, assert_real, install, rank_variables, witnesses
from tests.support.parity import OPTIM, batches, check_scalars, layout, narrow_reference, reference
from tests.support.xla_processes import start

RESUMED = "resumed"
"""Folder of a run that went on from a checkpoint of another."""

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
    """A pretended machine with one model, its data and a configuration."""

    folder: Path
    env: Mapping[str, str]

    @staticmethod
    def furnished(folder: Path, plan: Resolved, steps: int) -> Machine:
        """One whose run is that of `parity.reference`, on the instance `trn1.2xlarge`, with a checkpoint amid it."""
        hf_model(plan).save_pretrained(folder / "hf")
        np.save(folder / "rows.npy", torch.cat(batches(plan, steps)).numpy().astype(np.uint16))
        run, numbers = plan.config.train, {name: OPTIM[name] for name in ("lr", "clip", "eps", "weight_decay")}
        shape = {"seq_len": run.seq_len, "global_batch": run.global_batch, "micro_batch": run.micro_batch}
        text = CONFIG.format(folder=folder, steps=steps, every=max(1, steps // 2), **shape, **numbers)
        (folder / "config.toml").write_text(text, encoding="utf-8")
        return Machine(folder, {**install(folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)})

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

    @property
    def config(self) -> Path:
        return self.folder / "config.toml"

    def nxtrain(self, command: str, *overrides: str, **variables: str) -> str:
        """Run a command of nxtrain on the configuration."""
        return self.command("nxtrain", command, str(self.config), *overrides, **variables)

    def compile(self) -> None:
        """`nxtrain compile`, in forks of a process that has imported torch-xla."""
        argv = (neuron_machine.command, self.env, "compile", str(self.config))
        ended = start(*argv, env=self.env, log=self.folder / "compile.log").ended(280)
        assert ended.code == 0, ended.printed[-6000:]

    def train(self, *overrides: str, world: int = 1, **variables: str) -> str:
        """`nxtrain train` as one rank or several, in forks of a process that has imported torch-xla."""
        store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        ranks = []
        for rank in range(world):
            placement = rank_variables(rank, world, store.port) if world > 1 else {}
            env = {**self.env, **variables, **placement}
            argv = ("train", str(self.config), *overrides)
            ranks.append(start(neuron_machine.command, env, *argv, env=env, log=self.folder / f"train-{rank}.log"))
        ended = [rank.ended(280) for rank in ranks]
        printed = "".join(process.printed for process in ended)
        assert [process.code for process in ended] == [0] * world, printed[-6000:]
        return printed

    def resume(self, step: int, *overrides: str) -> str:
        """Go on in another folder from the checkpoint of a step."""
        at = self.folder / f"run/checkpoints/step-{step:08d}"
        return self.train(f"checkpoint.resume={at}", f"run.dir={self.folder / RESUMED}", *overrides)

    def records(self, run: str = "run") -> list[dict[str, float]]:
        """The lines of a run's metrics file, of what does not depend on the clock."""
        lines = (self.folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        kept = ("step", "loss", "grad_norm", "param_norm")
        return [{key: json.loads(line)[key] for key in kept} for line in lines]

    def column(self, key: str) -> list[float]:
        return [record[key] for record in self.records()]


STEPS, SAVED = 6, 3
PLAN = layout("odd", tp=1, micro=2, config={"num_attention_heads": 4, "num_key_value_heads": 2})


def test_what_was_compiled_beforehand_trains_as_transformers_does_and_resumes(tmp_path: Path) -> None:
    machine = Machine.furnished(tmp_path, PLAN, STEPS)
    machine.compile()
    printed = machine.train("compile.on_miss=stop")
    want = reference(PLAN, STEPS)
    check_scalars(machine.column("loss"), machine.column("grad_norm"), want)
    printed += machine.resume(SAVED, "compile.on_miss=stop")
    assert machine.records(RESUMED) == machine.records()[SAVED:]
    assert "Call compiler" not in printed
    assert_real(tmp_path, processes=3)
    assert not any(witness["rounds"] for witness in witnesses(tmp_path))


def test_bf16_that_the_hardware_rounds_stays_as_near_to_fp32_as_transformers_in_bf16(tmp_path: Path) -> None:
    machine = Machine.furnished(tmp_path, PLAN, STEPS)
    rule = ("precision.params=bf16", "precision.update=bf16_stochastic")
    machine.train(*rule)
    losses = machine.column("loss")
    exact, theirs = (course.losses for course in (reference(PLAN, STEPS), narrow_reference(PLAN, STEPS, masters=False)))
    errors = [max(abs(a - b) for a, b in zip(actual, exact, strict=True)) for actual in (losses, theirs)]
    assert 0.0 < errors[0] < 1.5 * errors[1], (errors, losses, theirs, exact)

    machine.resume(SAVED, *rule)
    # On hardware the steps after a resume draw other bits; a plain cast draws none.
    assert machine.records(RESUMED) == machine.records()[SAVED:]
    assert_real(tmp_path, processes=2)
    assert all(witness["rounds"] is True for witness in witnesses(tmp_path))


def test_two_ranks_whose_hosts_carry_their_collectives_train_as_transformers_does(tmp_path: Path) -> None:
    plan = layout("gqa2", tp=1, micro=1)
    machine = Machine.furnished(tmp_path, plan, 4)
    overrides = (
        "parallel.tp=1",
        "parallel.dp=2",
        "parallel.shard=zero1",
        "train.steps=4",
        "compile.max_recompiles=100",
    )
    machine.train(*overrides, "checkpoint.every=0", world=2, **{LINK: "1"})
    want = reference(plan, 4)
    check_scalars(machine.column("loss"), machine.column("grad_norm"), want)
    assert_real(tmp_path, processes=2)


@pytest.mark.nxd
def test_nxds_layers_and_flash_attention_train_as_near_to_fp32_as_transformers_in_bf16(tmp_path: Path) -> None:
    """With the kernels' device code alone replaced; `tests/support/nxd_cpu.py` says how to run it."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 90}
    plan = changed(
        layout("mha", tp=1, batch=2, micro=1, config={**shape, "max_position_embeddings": 2048}),
        train={"seq_len": 2048},
    )
    machine = Machine.furnished(tmp_path, plan, 3)
    overrides = ("backend.layers=nxd", "backend.attention=flash", "precision.params=bf16", "checkpoint.every=0")
    printed = machine.nxtrain("train", *overrides, "precision.update=fp32_master", **{NXD: "1"})
    assert "layers nxd: neuronx-distributed" in printed
    exact, theirs = reference(plan, 3).losses, narrow_reference(plan, 3, masters=True).losses
    errors = [
        max(abs(a - b) for a, b in zip(actual, exact, strict=True)) for actual in (machine.column("loss"), theirs)
    ]
    assert 0.0 < errors[0] < 1.5 * errors[1], (errors, machine.column("loss"), theirs, exact)
    assert_real(tmp_path, processes=1)
    (note,) = witnesses(tmp_path)[0]["notes"]
    assert note.startswith("flash attention: NKI's kernel of neuronx-distributed 0.")
