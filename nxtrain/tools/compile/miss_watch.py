"""Detection of graphs that a run on Neuron devices compiles although its manifest lacks them: `compile.on_miss`.

On PyTorch/XLA only Neuron's plugin knows the key of a graph, and prints the key when the compilation begins. So one
rank of each node watches the cache for new compiler locks. It looks for graphs that the manifest lacks and that a
process of this run compiles. The main thread waits inside the compiler's call meanwhile, so the watching thread stops
the run.

Other runs may compile on the same node. Their graphs are recognized by the compiler process: its command line names the
graph, and another run's agent is its ancestor. If no process names a graph, the graph counts as this run's after the
layout's `patience_s`. TorchNeuron's files appear when their compilation has ended, and do not name their process. So
each run on a node needs its own cache for `compile.on_miss` with TorchNeuron.

Source: what the plugin prints, "Call compiler with cmd: neuronx-cc compile ... model.MODULE_<graph>+<flags>.neff".
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from subprocess import DEVNULL

from nxtrain.backends.neuron.sdk import installed
from nxtrain.backends.xla.environment import extracting
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.placement import Placement
from nxtrain.config.cache_dir import cache_folder
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.launch.neuron import is_native, is_neuron
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.compile_key import build_of
from nxtrain.tools.compile.entries import NEFF_FOLDER, CacheKey, CacheLayout
from nxtrain.tools.compile.manifest import (
    GraphManifest,
    check_ready,
    describe_stages,
    differ,
    explain,
    manifest_file,
    other_manifests,
    read_manifest,
)
from nxtrain.tools.compile.module_folders import descends, naming

INTERVAL_S = 0.5
AFTERMATH_S = 5
"""Seconds between the end of a stopped run and the kill of its compiler processes."""

OnMiss = Callable[[CacheKey, Sequence[int]], None]
"""Callback for a graph that is compiled without being in the manifest; the arguments are its key and compiler PIDs."""


@contextmanager
def watch_misses(plan: Resolved, environ: Mapping[str, str]) -> Iterator[None]:
    """Watch a run for compilations of graphs that its manifest lacks.

    The watch runs on one rank per node, and on Neuron devices only.
    """
    config = plan.config
    placement = Placement.read(environ)
    if placement.local_rank or not is_neuron(config) or extracting(environ):
        yield
        return
    native = is_native(config)
    cache = Cache(cache_folder(config.compile, shared=native))
    for key in cache.break_locks():
        _say(f"broke the lock of {key}, whose owner is gone")
    parallel = config.parallel
    # Libraries reorder ranks only within a machine, which does not change the machine's stages.
    mesh = Mesh.build(placement.world, placement.rank, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp)
    manifest = _ready_manifest(config, mesh.stages_held(placement.rank, placement.local_world), cache)
    if manifest is None:
        yield
        return
    compiler = ""
    package = installed("neuronx-cc")
    if native:
        compiler = NEFF_FOLDER
    elif package is not None:
        compiler = f"neuronxcc-{package.version}"
    build = build_of(plan, placement.world, environ, compiler)
    different = [f"    {difference}" for difference in differ(manifest.build, build)]
    if different:
        _say("\n".join(["warning: this run is not what was compiled, and may need other graphs:", *different]))

    def report(key: CacheKey, compilers: Sequence[int]) -> None:
        miss = explain(manifest, build, key)
        if config.compile.on_miss == "stop":
            _stop_run(miss, cache, key, compilers)
        else:
            _say(f"warning: {miss}")

    # Ranks of one node have one parent, the agent, from which all their compilers descend.
    ancestor = os.getpid()
    if placement.local_world > 1:
        ancestor = os.getppid()
    watch = MissWatch(cache.layout(manifest.build.compiler), manifest.keys, ancestor, report)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class MissWatch(threading.Thread):
    """Thread that finds graphs that a run compiles and that its manifest lacks.

    Args:
        layout: File layout of the cache.
        expected: Keys of the manifest's graphs.
        ancestor: PID of the process from which all compilers of the run descend.
        on_miss: Called once for each graph found.
    """

    def __init__(self, layout: CacheLayout, expected: Collection[CacheKey], ancestor: int, on_miss: OnMiss) -> None:
        super().__init__(name="nxtrain-compile-guard", daemon=True)
        self._layout = layout
        self._ancestor = ancestor
        self._on_miss = on_miss
        self._settled = set(expected)
        self._first_seen_s: dict[CacheKey, float] = {}
        self._stopped = threading.Event()
        # A compilation that began before the run belongs to another run.
        self._others = set(layout.begun())

    def stop(self) -> None:
        """Stop the thread, after one last check for new graphs."""
        self._stopped.set()
        self.join()
        self.poll()

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self.poll()

    def poll(self) -> None:
        """Check once for new graphs, and report each of them."""
        now_s = time.monotonic()
        begun = {key for key, _ in set(self._layout.begun()) - self._others} - self._settled
        self._first_seen_s = {key: self._first_seen_s.get(key, now_s) for key in sorted(begun)}
        for key, seen_s in self._first_seen_s.items():
            processes = list(naming(key.module))
            ours = [pid for pid in processes if descends(pid, self._ancestor)]
            if ours or (not processes and now_s - seen_s >= self._layout.patience_s):
                self._settled.add(key)
                self._on_miss(key, ours)


def _ready_manifest(config: RunConfig, stages: Sequence[int], cache: Cache) -> GraphManifest | None:
    """Read and check the manifest of the pipeline stages on this machine.

    Returns:
        None if the manifest is missing or damaged.

    Raises:
        BackendError: The same with `compile.on_miss=stop`, or a graph is missing in the cache.
    """
    stops = config.compile.on_miss == "stop"
    file = manifest_file(config, stages)
    if not file.exists():
        absent = f"there is no {file}"
        if stages:
            absent += f", the manifest of a machine that holds {describe_stages(stages, config.parallel.pp)}"
        others = other_manifests(config, file)
        if others:
            absent += f", but {', '.join(map(str, others))}"
        if stops:
            raise BackendError(f"compile.on_miss=stop, but {absent}; to write the manifest: nxtrain compile CONFIG")
        _say(f"{absent}: every graph that {cache} lacks is compiled when it is met; see nxtrain compile --help")
        return None
    manifest: GraphManifest | None = None
    try:
        manifest = read_manifest(file)
        check_ready(manifest, cache)
    except (ConfigError, BackendError) as error:
        if stops:
            raise
        _say(f"warning: {error}")
    return manifest


def _stop_run(miss: str, cache: Cache, key: CacheKey, compilers: Sequence[int]) -> None:
    """End this rank because of a graph that was not compiled beforehand; the agent then ends the whole run."""
    _say(f"error: {miss}")
    # The next run that needs the graph would wait for a lock that no process holds any more.
    cache.mark_lock_stale(key)
    if compilers:
        # Compilers are killed after the ranks, since a rank without its compiler would report the wrong cause.
        end = f"sleep {AFTERMATH_S}; kill -9 {' '.join(map(str, compilers))}"
        subprocess.Popen(["sh", "-c", end], stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
    os._exit(BackendError.exit_code)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
