"""`nxtrain compile`: every graph of a run, compiled on this node before it starts, and a list of them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nxtrain.backends.neuron import sdk
from nxtrain.common.errors import BackendError, ConfigError, Problem
from nxtrain.common.mesh import Mesh, spans
from nxtrain.config.cache_dir import cache_folder
from nxtrain.config.check import resolve_config
from nxtrain.config.load import Loaded, load
from nxtrain.config.schema import RunConfig
from nxtrain.launch.local import FIRST_NODE, ranks_per_node, render
from nxtrain.launch.neuron import compiles_ahead, is_native
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.compile_key import build_of
from nxtrain.tools.compile.entries import CacheKey
from nxtrain.tools.compile.manifest import (
    CompiledGraph,
    GraphManifest,
    manifest_file,
    read_manifest,
    stage_words,
    write_manifest,
)
from nxtrain.tools.compile.memory import host_memory
from nxtrain.tools.compile.native_compile import precompile_native
from nxtrain.tools.compile.parallel_compile import Compiled, CompileJob, compile_graphs, print_line
from nxtrain.tools.compile.tool import TOOL, tool_argv

GRACE_S = 30.0
"""Seconds since the last write to an entry for which a lock without an owner is believed: here the tool has ended, and
with it every compiler that this node is known to run."""


def precompile(
    path: Path,
    overrides: Sequence[str],
    *,
    nproc: int | None,
    first_node: str,
    workers: int | None,
    retries: int,
    dry_run: bool,
) -> None:
    """Compile the graphs of a run and write its manifest.

    Args:
        path: Configuration file.
        overrides: `dotted.key=value` each.
        nproc: Number of ranks per machine; None: as many as the degrees ask for.
        first_node: Of several machines the name of one, where the others meet it.
        workers: Compilers at a time; None: as many as the memory holds.
        retries: Times that what failed is tried again, on one machine.
        dry_run: Print environment and command, and start nothing.

    Raises:
        ConfigError: The configuration cannot run on that many ranks of Neuron devices.
        BackendError: The Neuron SDK is not here, or graphs could not be compiled.
    """
    loaded = load(path, overrides)
    config = loaded.config
    _check_backend(loaded)
    _check_nodes(loaded, first_node, dry_run)
    if is_native(config):
        precompile_native(path, overrides, nproc=nproc, first_node=first_node, dry_run=dry_run)
        return
    # Whoever shows no graphs once shows none the next time, and many restarts would hide its message.
    overrides = [*overrides, "recovery.max_restarts=0"]
    command = render(path, overrides, nproc, os.environ, first_node=first_node or FIRST_NODE)
    memory = host_memory()
    num_workers = workers or memory.num_compilers
    if dry_run:
        about = (*command.about, *_manifests(config, ranks_per_node(config, nproc)))
        print(replace(command, argv=tool_argv(TOOL, num_workers, Path("DIR"), command.argv), about=about))
        return
    tool = _find_tool()
    reason = str(memory)
    if workers:
        reason = "as --workers asks"
    print_line(f"up to {num_workers} graphs at a time: {reason}")
    began = time.monotonic()
    env = {**os.environ, **command.env}
    cache = Cache(cache_folder(config.compile), grace_s=GRACE_S)
    compiled = compile_graphs(CompileJob(tool, command.argv, env, cache), num_workers, retries_of(config, retries))
    world = ranks_per_node(config, nproc) * config.cluster.nodes
    build = build_of(resolve_config(loaded, world), world, env, next(iter(compiled.names)).compiler)
    file = manifest_file(config, compiled.stages)
    write_manifest(GraphManifest(config.run.name, build, _graphs(compiled, file), compiled.stages), file)
    graphs, new = f"{len(compiled.names)} graphs", len(compiled.seconds)
    if compiled.stages:
        graphs += f" of {stage_words(compiled.stages, config.parallel.pp)}"
    print_line(f"all {graphs} are in {cache}, {new} of them new, after {time.monotonic() - began:.0f} s; see {file}")


def retries_of(config: RunConfig, wanted: int) -> int:
    """Times that failed graphs are tried again: of several nodes one alone has nobody to show them with."""
    if config.cluster.nodes > 1:
        return 0
    return wanted


def _manifests(config: RunConfig, num_ranks: int) -> list[str]:
    """Lines that name the manifest of each group of machines."""
    parallel, nodes = config.parallel, range(config.cluster.nodes)
    mesh = Mesh.build(num_ranks * len(nodes), 0, tp=parallel.tp, pp=parallel.pp)
    machines: dict[tuple[int, ...], list[int]] = {}
    for node in nodes:
        machines.setdefault(mesh.stages_held(node * num_ranks, num_ranks), []).append(node)
    if list(machines) == [()]:
        return [f"writes {manifest_file(config)}"]
    return [
        f"machines {spans(numbers)}, as torchrun counts them, hold {stage_words(stages, parallel.pp)} and write "
        f"{manifest_file(config, stages)}"
        for stages, numbers in machines.items()
    ]


def _graphs(compiled: Compiled, file: Path) -> tuple[CompiledGraph, ...]:
    """The rows of the manifest; what was compiled before keeps the seconds that it had in it."""
    before: dict[CacheKey, float | None] = {}
    with suppress(ConfigError):  # there is none, or one of another release
        old = read_manifest(file)
        before = {CacheKey(old.build.compiler, graph.module): graph.seconds for graph in old.graphs}
    graphs = []
    for key, name in compiled.names.items():
        seconds = before.get(key)
        if key in compiled.seconds:
            seconds = round(compiled.seconds[key], 1)
        graphs.append(CompiledGraph(name, key.module, seconds))
    return tuple(graphs)


def _check_backend(loaded: Loaded) -> None:
    name = loaded.config.backend.name
    if not compiles_ahead(loaded.config) and name != "auto":
        reason = f"{name} compiles no graphs beforehand; Neuron devices do"
        raise ConfigError(
            [
                Problem(
                    "backend.name", reason, loaded.origins["backend.name"], "use backend.name=neuron or neuron-native"
                )
            ]
        )


def _check_nodes(loaded: Loaded, first_node: str, dry_run: bool) -> None:
    nodes = loaded.config.cluster.nodes
    if nodes > 1 and not first_node and not dry_run:
        reason = f"{nodes} machines show the graphs together, and have to meet"
        hint = (
            "on each of them at the same time: nxtrain compile CONFIG --first-node NAME, with the name of one of them"
        )
        raise ConfigError([Problem("cluster.nodes", reason, loaded.origins["cluster.nodes"], hint)])


def _find_tool() -> str:
    support = sdk.support()
    if not support.ok:
        raise BackendError(f"graphs cannot be compiled here: {support.reason}")
    tool = shutil.which(TOOL)
    if tool is None:
        hint = f"activate the environment that has it, or {sdk.install_command()}"
        raise BackendError(f"{TOOL}, a program of torch-neuronx, is not on PATH; {hint}")
    return tool
