"""Compilation of TorchNeuron's graphs for `nxtrain compile`, by a short run of the configuration.

TorchNeuron compiles inside the ranks and has no tool that extracts graphs. So the run itself is started in a temporary
folder. Training, evaluation, checkpoints and votes all occur within its first steps. The cache files that the ranks
read or write are the graphs of the run.

AWS documents a mode that compiles without a device and names no variable for it. The installed packages may contain the
variable of the beta. Then ranks on a machine without a device compile in this mode. They read no value, as under
`neuron_parallel_compile`. Operations outside of compiled graphs may compile in the run itself.

Source: torch/compile/about-torch-compile.html, and vllm-neuron/docs/design/compilation/cpu_compilation.html for the
variable of the chip, in https://awsdocs-neuron.readthedocs-hosted.com/en/latest.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from nxtrain.backends.neuron import torchneuron, torchneuron_names
from nxtrain.backends.neuron.sdk import num_devices
from nxtrain.common.errors import BackendError
from nxtrain.config.schema import RunConfig
from nxtrain.launch.environment import Variable
from nxtrain.launch.neuron import machine_of
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.entries import NEFF_FOLDER
from nxtrain.tools.compile.parallel_compile import Compiled, print_line

STEPS = 4
"""Steps of the short run; each kind of step and each interval occurs twice."""

_DOCS = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest"


def short_run_overrides(config: RunConfig, folder: Path) -> list[str]:
    """Configuration overrides for a short run that compiles every graph of the configured run.

    Training, evaluation, checkpoints and votes all occur within a few steps, in a temporary folder. Learning rates are
    tensors, so their schedule does not change graphs.
    """
    overrides = [
        f"train.steps={STEPS}",
        "train.epochs=0",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
        "optim.warmup_ratio=0",
        "optim.decay_ratio=0",
        "optim.decay_shape=linear",
        "optim.pieces=[]",
        f"run.dir={folder}",
        "checkpoint.resume=never",
        "checkpoint.mirror=",
        "metrics.log_every=1",
        "metrics.tensorboard=false",
        "compile.on_miss=compile",
        "recovery.max_restarts=0",
    ]
    if config.train.eval_every:
        overrides.append("train.eval_every=2")
    if config.checkpoint.every:
        overrides.append("checkpoint.every=2")
    if config.recovery.vote_every:
        overrides.append("recovery.vote_every=2")
    return overrides


def deviceless_mode(config: RunConfig) -> tuple[tuple[Variable, ...], str]:
    """Environment variables of TorchNeuron's beta mode that compiles without a device.

    Returns:
        The variables; the reason why the mode is unavailable. Both are empty if this machine has a device.
    """
    if num_devices():
        return (), ""
    name = torchneuron.COMPILE_ONLY
    instance = machine_of(config)
    reads = torchneuron_names.reads(name)
    if reads is None:
        return (), "nor can they without a device: TorchNeuron is not installed here"
    if not reads:
        return (), f"nor can they without a device: the installed TorchNeuron does not read {name}"
    if not config.compile.torch_compile:
        needed = "without a device, compile.torch_compile=true is needed"
        return (), f"{needed}: only graphs of torch.compile are compiled there"
    if instance is None:
        return (), "without a device, cluster.instance is needed, which names the chip to compile for"
    mode_page = f"{_DOCS}/torch/compile/about-torch-compile.html"
    chip_page = f"{_DOCS}/vllm-neuron/docs/design/compilation/cpu_compilation.html"
    chip = "NEURON_PLATFORM_TARGET_OVERRIDE"
    variables = (
        Variable(name, "1", "graphs are compiled and not run; this machine has no device", mode_page),
        Variable(chip, instance.target, "chip to compile for, which nothing here shows", chip_page),
    )
    return variables, ""


def check_torchneuron(mode: Sequence[Variable], why_no_mode: str) -> None:
    """Check that TorchNeuron can compile graphs on this machine, and print a notice if it has no device.

    Raises:
        BackendError: TorchNeuron cannot compile here.
    """
    support = torchneuron.support(devices=not mode)
    if not support.ok:
        lines = [f"graphs cannot be compiled here: {support.reason}"]
        if why_no_mode:
            lines.append(why_no_mode)
        raise BackendError("\n    ".join(lines))
    if mode:
        print_line(
            "no Neuron device here: graphs are compiled in TorchNeuron's mode without one, which is untested. "
            "Operations outside of graphs are left out, so compile.on_miss=stop may stop a run at these"
        )


def compile_by_short_run(argv: Sequence[str], env: Mapping[str, str], cache: Cache) -> Compiled:
    """Execute the short run, and return the graphs that its ranks used: cache files that are new or were read."""
    before = {key for key in cache.done() if key.compiler == NEFF_FOLDER}
    for key in before:
        # With the mount option relatime, a read updates the access time only after a change.
        changed_ns = (cache.root / str(key)).stat().st_mtime_ns
        os.utime(cache.root / str(key), ns=(changed_ns - 1_000_000_000, changed_ns))
    done = subprocess.run(argv, env=env, check=False)
    if done.returncode:
        raise BackendError(
            f"the short run that compiles the graphs ended with exit code {done.returncode}; see its output above"
        )
    used = []
    for key in sorted(cache.done()):
        if key.compiler == NEFF_FOLDER:
            stat = (cache.root / str(key)).stat()
            if key not in before or stat.st_atime_ns >= stat.st_mtime_ns:
                used.append(key)
    if not used:
        raise BackendError(f"the short run put no graph into {cache}; check that TorchNeuron's cache is not disabled")
    names = {key: f"graph {number}" for number, key in enumerate(used, start=1)}
    return Compiled(names, dict.fromkeys(set(used) - before))
