"""Watch of a run on Neuron devices for graphs that were not compiled beforehand: `compile.on_miss`.

On PyTorch/XLA only Neuron's plugin knows the key of a graph, and shows it when it begins to compile. So one rank of
each node watches the cache for a graph that the manifest lacks, under a new lock, compiled by a process of this run.
The main thread then waits inside the compiler's call, so the watching thread ends the run.

Other runs compile on a node too. Their graphs are recognised by the compiler process, whose command line names the
graph: it descends from another run's agent. If no process names a graph, it counts as this run's after the layout's
`patience_s`. TorchNeuron's files appear when their compilation has ended, and do not name the process that made them.
Runs of one node need caches of their own for `compile.on_miss` there.

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
    differ,
    explain,
    manifest_file,
    other_manifests,
    read_manifest,
    stage_words,
)
from nxtrain.tools.compile.module_folders import descends, naming

INTERVAL_S = 0.5
AFTERMATH_S = 5
"""Seconds from the end of a run to the end of its compilers, whose results nobody needs."""

OnMiss = Callable[[CacheKey, Sequence[int]], None]
"""Callback for a graph that is being compiled, with the processes that compile it."""


@contextmanager
def watch_misses(plan: Resolved, environ: Mapping[str, str]) -> Iterator[None]:
    """Watch a run for graphs that its manifest lacks, on one rank per node, and on Neuron devices only."""
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
    # No library's order of ranks, which goes within a machine, changes the stages that it holds.
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
    """Thread that looks for graphs that a run compiles and that its manifest lacks.

    `ancestor` is the process from which all compilers of the run descend. `on_miss` is called once for each graph.
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
        """Stop the thread, and check for new graphs a last time."""
        self._stopped.set()
        self.join()
        self.poll()

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self.poll()

    def poll(self) -> None:
        """Check once for new graphs, and report each."""
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
    """Manifest of the stages of this machine; None if absent or damaged, an error with `compile.on_miss=stop`."""
    stops = config.compile.on_miss == "stop"
    file = manifest_file(config, stages)
    if not file.exists():
        absent = f"there is no {file}"
        if stages:
            absent += f", the manifest of a machine that holds {stage_words(stages, config.parallel.pp)}"
        others = other_manifests(config, file)
        if others:
            absent += f", but {', '.join(map(str, others))}"
        if stops:
            raise BackendError(f"compile.on_miss=stop, but {absent}; write it with: nxtrain compile CONFIG")
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
    """End this rank, and with it the run, which an agent ends when a rank does."""
    _say(f"error: {miss}")
    # The next run that needs the graph would wait for a lock that no process holds any more.
    cache.disown(key)
    if compilers:
        # Compilers end after the ranks: a rank without its compiler would report the wrong cause.
        end = f"sleep {AFTERMATH_S}; kill -9 {' '.join(map(str, compilers))}"
        subprocess.Popen(["sh", "-c", end], stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
    os._exit(BackendError.exit_code)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
