"""`nxtrain compile`: compile every graph of a run on this node before the run starts, and write their manifest."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nxtrain.backends.neuron import sdk
from nxtrain.common.errors import BackendError, ConfigError, Problem
from nxtrain.common.mesh import Mesh, spans
from nxtrain.config.cache_dir import cache_folder
from nxtrain.config.load import Loaded, load
from nxtrain.config.schema import RunConfig
from nxtrain.launch.environment import Variable
from nxtrain.launch.local import FIRST_NODE, ranks_per_node, render
from nxtrain.launch.neuron import is_native, is_neuron
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.compile_key import build_of
from nxtrain.tools.compile.entries import CacheKey
from nxtrain.tools.compile.manifest import (
    CompiledGraph,
    GraphManifest,
    describe_stages,
    manifest_file,
    read_manifest,
    write_manifest,
)
from nxtrain.tools.compile.memory import host_memory
from nxtrain.tools.compile.native_compile import (
    check_torchneuron,
    compile_by_short_run,
    deviceless_mode,
    short_run_overrides,
)
from nxtrain.tools.compile.parallel_compile import Compiled, compile_graphs, print_line
from nxtrain.tools.compile.tool import TOOL, tool_argv

GRACE_S = 30.0
"""Seconds after the last write to an entry during which a lock without an owner counts as live.

The compile tool has ended by then, and with it every compiler process of this node.
"""


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
        overrides: Overrides of configuration keys.
        nproc: Ranks per machine; None: from the configuration or the devices.
        first_node: Name of the machine at which the machines of a run find each other; empty for one machine.
        workers: Compiler processes at a time; None: as many as fit into memory.
        retries: Further attempts for graphs that failed.
        dry_run: Print the command line in place of running it.
    """
    # A run that records no graphs records none after a restart, and many restarts would hide its message.
    changes = ["recovery.max_restarts=0"]
    loaded = load(path, [*overrides, *changes])
    native = is_native(loaded.config)
    _check(loaded, native=native, meets=bool(first_node) or dry_run)
    folder = Path("DIR")
    if not dry_run:
        folder = Path(tempfile.gettempdir()) / f"nxtrain-compile-{uuid.uuid4().hex}"
    mode: tuple[Variable, ...] = ()
    why_no_mode = ""
    if native:
        mode, why_no_mode = deviceless_mode(loaded.config)
        changes = short_run_overrides(loaded.config, folder)
        loaded = load(path, [*overrides, *changes])
    command = render(loaded, path, [*overrides, *changes], nproc, os.environ, first_node=first_node or FIRST_NODE)
    if command.plan is None or command.problems:
        raise ConfigError(command.problems)
    config, plan = loaded.config, command.plan
    # A rendezvous of its own: ranks of a run would wait for those that extract graphs.
    argv = tuple(f"{word}-compile" if word.startswith("--rdzv-id=") else word for word in command.argv)
    command = replace(command, argv=argv, variables=(*command.variables, *mode))
    num_ranks = ranks_per_node(config, nproc)
    memory = host_memory()
    num_workers = workers or memory.num_compilers
    if dry_run:
        if not native:
            argv = tool_argv(TOOL, num_workers, folder, argv)
        print(replace(command, argv=argv, about=(*command.about, *_manifests(config, num_ranks))))
        return

    began = time.monotonic()
    env = {**os.environ, **command.env}
    cache = Cache(cache_folder(config.compile, shared=native), grace_s=GRACE_S)
    if native:
        check_torchneuron(mode, why_no_mode)
        compiled = compile_by_short_run(command.argv, env, cache)
    else:
        tool = _find_tool()
        print_line(f"up to {num_workers} graphs at a time: {'as --workers asks' if workers else memory}")
        if config.cluster.nodes > 1:
            retries = 0  # one of several nodes cannot extract failed graphs alone
        folder.mkdir(mode=0o700)
        compiled = compile_graphs(tool, command.argv, env, cache, folder, num_workers, retries)
    shutil.rmtree(folder, ignore_errors=True)

    file = manifest_file(config, compiled.stages)
    build = build_of(plan, num_ranks * config.cluster.nodes, env, next(iter(compiled.names)).compiler)
    write_manifest(GraphManifest(config.run.name, build, _graphs(compiled, file), compiled.stages), file)
    graphs, num_new = f"{len(compiled.names)} graphs", len(compiled.seconds)
    if compiled.stages:
        graphs += f" of {describe_stages(compiled.stages, config.parallel.pp)}"
    print_line(
        f"all {graphs} are in {cache}, {num_new} of them new, after {time.monotonic() - began:.0f} s; see {file}"
    )


def _manifests(config: RunConfig, num_ranks: int) -> list[str]:
    """Lines of the dry run that name the manifest of each group of machines."""
    parallel, nodes = config.parallel, range(config.cluster.nodes)
    mesh = Mesh.build(num_ranks * len(nodes), 0, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp)
    machines: dict[tuple[int, ...], list[int]] = {}
    for node in nodes:
        machines.setdefault(mesh.stages_held(node * num_ranks, num_ranks), []).append(node)
    if list(machines) == [()]:
        return [f"writes {manifest_file(config)}"]
    return [
        f"machines {spans(numbers)}, as torchrun counts them, hold {describe_stages(stages, parallel.pp)} and write "
        f"{manifest_file(config, stages)}"
        for stages, numbers in machines.items()
    ]


def _graphs(compiled: Compiled, file: Path) -> tuple[CompiledGraph, ...]:
    """Graphs of the manifest; compile times of earlier compilations come from the existing manifest file."""
    seconds: dict[CacheKey, float | None] = {}
    with suppress(ConfigError):  # the manifest is missing, or of another release
        old = read_manifest(file)
        for key, graph in zip(old.keys, old.graphs, strict=True):
            seconds[key] = graph.seconds
    for key, time_s in compiled.seconds.items():
        seconds[key] = time_s and round(time_s, 1)
    return tuple(CompiledGraph(name, key.module, seconds.get(key)) for key, name in compiled.names.items())


def _check(loaded: Loaded, *, native: bool, meets: bool) -> None:
    """Refuse a configuration whose graphs cannot be compiled before the run."""
    config, origins = loaded.config, loaded.origins
    name, nodes = config.backend.name, config.cluster.nodes
    problem = None
    if not is_neuron(config) and name != "auto":
        reason = f"{name} has no graphs that are compiled before a run; Neuron devices have"
        hint = "use backend.name=neuron or neuron-native"
        problem = Problem("backend.name", reason, origins["backend.name"], hint)
    elif nodes > 1 and not meets:
        reason = f"the graphs of a run on {nodes} machines are extracted on all of them together"
        command = "nxtrain compile CONFIG --first-node NAME"
        hint = f"on each machine at the same time: {command}, where NAME is the same machine everywhere"
        problem = Problem("cluster.nodes", reason, origins["cluster.nodes"], hint)
    elif native and nodes > 1 and config.parallel.pp > 1:
        reason = f"pp={config.parallel.pp} over {nodes} machines: TorchNeuron's files do not name their pipeline stage"
        problem = Problem("parallel.pp", reason, hint="let the run compile at first use: compile.on_miss")
    if problem is not None:
        raise ConfigError([problem])


def _find_tool() -> str:
    support = sdk.support()
    if not support.ok:
        raise BackendError(f"graphs cannot be compiled here: {support.reason}")
    tool = shutil.which(TOOL)
    if tool is None:
        hint = f"activate the environment that has it, or {sdk.install_command()}"
        raise BackendError(f"{TOOL}, a program of torch-neuronx, is not on PATH; {hint}")
    return tool
