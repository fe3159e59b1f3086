"""Whole commands on a pretended Trainium machine, with the weights and batches of `parity.reference`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed import TCPStore

from nxtrain.config.check import Resolved
from tests.support import ROOT, neuron_machine
from tests.support.models import hf_model
from tests.support.neuron_machine import install, rank_variables
from tests.support.parity import OPTIM, batches
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
            place = rank_variables(rank, world, store.port) if world > 1 else {}
            env = {**self.env, **variables, **place}
            argv = ("train", str(self.config), *overrides)
            ranks.append(start(neuron_machine.command, env, *argv, env=env, log=self.folder / f"train-{rank}.log"))
        ended = [rank.ended(280) for rank in ranks]
        printed = "".join(each.printed for each in ended)
        assert [each.code for each in ended] == [0] * world, printed[-6000:]
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
