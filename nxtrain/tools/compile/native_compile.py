"""`nxtrain compile` for TorchNeuron: a few steps of the run, on its devices or without them, and a manifest of graphs.

TorchNeuron compiles inside of the ranks and has no tool that collects graphs. So the run itself is started, with each
kind of work in its first steps, in a folder that is deleted afterwards. Files of the cache that the ranks read or wrote
are the graphs of the run.

AWS documents a mode that compiles without a device and names no variable for it. If this machine has no device, and the
installed packages contain the variable of the beta, the ranks go through the graphs in this mode. Then they read no
value, as under `neuron_parallel_compile`. Operations outside of compiled graphs may compile in the run itself.

Source: torch/compile/about-torch-compile.html, and vllm-neuron/docs/design/compilation/cpu_compilation.html for the
variable of the chip, in https://awsdocs-neuron.readthedocs-hosted.com/en/latest.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from nxtrain.backends.neuron import torchneuron, torchneuron_names
from nxtrain.backends.neuron.sdk import num_devices
from nxtrain.common.errors import BackendError, ConfigError, Problem
from nxtrain.config.cache_dir import cache_folder
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.config.schema import RunConfig
from nxtrain.launch.environment import Variable
from nxtrain.launch.local import FIRST_NODE, Command, ranks_per_node, render
from nxtrain.launch.neuron import machine_of
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.compile_key import native_build_of
from nxtrain.tools.compile.entries import CacheKey, is_neff
from nxtrain.tools.compile.manifest import CompiledGraph, GraphManifest, manifest_file, write_manifest
from nxtrain.tools.compile.parallel_compile import print_line

STEPS = 4
"""Steps of the rehearsal: the work of each step and of each interval is done twice."""

_DOCS = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest"


def precompile_native(
    path: Path, overrides: Sequence[str], *, nproc: int | None, first_node: str, dry_run: bool
) -> None:
    """Compile the graphs of a run by TorchNeuron and write its manifest.

    Args:
        path: Configuration file.
        overrides: `dotted.key=value` each.
        nproc: Number of ranks per machine; None: as many as the degrees ask for.
        first_node: Of several machines the name of one, where the others meet it.
        dry_run: Print environment and command, and start nothing.

    Raises:
        ConfigError: The configuration cannot run on that many ranks, or its stages are spread over machines.
        BackendError: Neither devices nor the mode without them can be had here, or the rehearsal failed.
    """
    loaded = load(path, overrides)
    config = loaded.config
    if config.cluster.nodes > 1 and config.parallel.pp > 1:
        reason = f"pp={config.parallel.pp} over {config.cluster.nodes} machines: TorchNeuron's files name no stage"
        raise ConfigError([Problem("parallel.pp", reason, hint="let the run compile at first use: compile.on_miss")])
    with tempfile.TemporaryDirectory(prefix="nxtrain-compile-") as folder:
        wanted = [*overrides, *rehearsal(config, Path(folder))]
        command = render(path, wanted, nproc, os.environ, first_node=first_node or FIRST_NODE)
        command = replace(command, variables=(*command.variables, *_without_devices(config)))
        if dry_run:
            print(replace(command, about=(*command.about, f"writes {manifest_file(config)}")))
            return
        support = torchneuron.support(devices=not torchneuron.compiles_only(command.env))
        if not support.ok:
            lines = [f"graphs cannot be compiled here: {support.reason}"]
            if not num_devices() and _why_no_mode(config):
                lines.append(_why_no_mode(config))
            raise BackendError("\n    ".join(lines))
        if torchneuron.compiles_only(command.env):
            print_line(
                "no Neuron device here: graphs are compiled in TorchNeuron's mode without one, which is untested. "
                "Operations outside of graphs are left out, so compile.on_miss=stop may stop a run at these"
            )
        cache = Cache(cache_folder(config.compile, shared=True))
        began = time.monotonic()
        used, new = _rehearse(command, cache)
    world = ranks_per_node(config, nproc) * config.cluster.nodes
    build = native_build_of(resolve_config(loaded, world), world, {**os.environ, **command.env})
    file = manifest_file(config)
    graphs = tuple(CompiledGraph(f"graph {number}", key.module, None) for number, key in enumerate(used, start=1))
    write_manifest(GraphManifest(config.run.name, build, graphs), file)
    duration = f"after {time.monotonic() - began:.0f} s"
    print_line(f"all {len(used)} graphs are in {cache}, {len(new)} of them new, {duration}; see {file}")


def rehearsal(config: RunConfig, folder: Path) -> list[str]:
    """Overrides that make a run do each kind of its work within a few steps, and leave nothing behind.

    Learning rates are tensors and their schedule shapes no graph; its length stays, so that its check holds.
    """
    given = {
        "train.eval_every": config.train.eval_every,
        "checkpoint.every": config.checkpoint.every,
        "recovery.vote_every": config.recovery.vote_every,
    }
    return [
        f"train.steps={STEPS}",
        "train.epochs=0",
        f"optim.decay_steps={config.optim.decay_steps or config.train.steps}",
        f"run.dir={folder}",
        "checkpoint.resume=never",
        "checkpoint.mirror=",
        "metrics.log_every=1",
        "metrics.tensorboard=false",
        "compile.on_miss=compile",
        "recovery.max_restarts=0",
        *(f"{key}=2" for key, every in given.items() if every),
    ]


def _without_devices(config: RunConfig) -> list[Variable]:
    """Variables of the mode without a device; none if there are devices, or if the mode cannot be had here."""
    instance = machine_of(config)
    if num_devices() or instance is None or _why_no_mode(config):
        return []
    reason = "graphs are compiled and not run; this machine has no device"
    target = "chip to compile for, which nothing here shows"
    return [
        Variable(torchneuron.COMPILE_ONLY, "1", reason, f"{_DOCS}/torch/compile/about-torch-compile.html"),
        Variable(
            "NEURON_PLATFORM_TARGET_OVERRIDE",
            instance.target,
            target,
            f"{_DOCS}/vllm-neuron/docs/design/compilation/cpu_compilation.html",
        ),
    ]


def _why_no_mode(config: RunConfig) -> str:
    """Line about the reason that the mode without a device cannot be had; empty if there is none."""
    if torchneuron_names.reads(torchneuron.COMPILE_ONLY) is None:
        return "nor can they without a device: TorchNeuron is not installed here"
    if not torchneuron_names.reads(torchneuron.COMPILE_ONLY):
        return f"nor can they without a device: the installed TorchNeuron does not read {torchneuron.COMPILE_ONLY}"
    if not config.compile.torch_compile:
        return "without a device, compile.torch_compile=true is needed: only graphs of torch.compile are compiled there"
    if machine_of(config) is None:
        return "without a device, cluster.instance is needed, which names the chip to compile for"
    return ""


def _rehearse(command: Command, cache: Cache) -> tuple[list[CacheKey], set[CacheKey]]:
    """Start the command; returns the graphs that the ranks used, and the new ones among these."""
    before = _graphs(cache)
    _forget_reads(cache, before)
    done = subprocess.run(command.argv, env={**os.environ, **command.env}, check=False)
    if done.returncode:
        raise BackendError(f"the rehearsal of the run ended with exit code {done.returncode}; its lines above say why")
    after = _graphs(cache)
    used = [key for key in sorted(after) if key not in before or _was_read(cache, key)]
    if not used:
        raise BackendError(f"the rehearsal left no graph in {cache}; check that TorchNeuron's cache is not disabled")
    return used, set(after) - set(before)


def _graphs(cache: Cache) -> Collection[CacheKey]:
    return {key for key in cache.done() if is_neff(key)}


def _forget_reads(cache: Cache, keys: Collection[CacheKey]) -> None:
    """Set times of access before those of change, so that a mount with relative access times notes the next read."""
    for key in keys:
        entry = cache.entry(key)
        if entry is not None:
            changed = entry.folder.stat().st_mtime_ns
            os.utime(entry.folder, ns=(changed - 1_000_000_000, changed))


def _was_read(cache: Cache, key: CacheKey) -> bool:
    """True if a file was read since `_forget_reads`."""
    entry = cache.entry(key)
    if entry is None:
        return False
    stat = entry.folder.stat()
    return stat.st_atime_ns >= stat.st_mtime_ns
