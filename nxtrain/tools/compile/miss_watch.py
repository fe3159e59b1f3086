"""Watch of a run on Neuron devices for graphs that were not compiled beforehand: `compile.on_miss`.

TorchNeuron's files are watched by their names alone (`NeffWatch`).

On PyTorch/XLA only Neuron's plugin knows the key of a graph, and shows it when it begins to compile. So one rank of
each node watches the cache for a graph that the manifest lacks, under a new lock, compiled by a process of this run.
The main thread then waits inside the compiler's call, so the watching thread ends the run.

Other runs compile on a node too. Their graphs are recognised by the compiler process, whose command line names the
graph: it descends from another run's agent. If no process names a graph, it counts as this run's after `PATIENCE_S`.

Source: what the plugin prints, "Call compiler with cmd: neuronx-cc compile ... model.MODULE_<graph>+<flags>.neff".
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import DEVNULL

from nxtrain.backends.neuron.sdk import installed
from nxtrain.backends.xla.environment import extracting
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.placement import Placement
from nxtrain.config.cache_dir import cache_folder
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.launch.neuron import compiles_ahead, is_native
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.compile_key import build_of, native_build_of
from nxtrain.tools.compile.entries import DONE, CacheKey, locks, parse_key
from nxtrain.tools.compile.lock_owners import descends, naming, read_owner
from nxtrain.tools.compile.manifest import (
    Build,
    GraphManifest,
    check_ready,
    differ,
    explain,
    manifest_file,
    other_manifests,
    read_manifest,
    stage_words,
)

INTERVAL_S = 0.5
PATIENCE_S = 15.0
"""Seconds for which a lock is given the time to show its compiler."""

AFTERMATH_S = 5
"""Seconds from the end of a run to that of its compilers, which would work on for nobody."""

OnMiss = Callable[[CacheKey, Sequence[int]], None]
"""Callback for a graph that is being compiled, with the processes that compile it."""


@contextmanager
def watch_misses(plan: Resolved, environ: Mapping[str, str]) -> Iterator[None]:
    """Hold a run to its manifest while it lasts; on one rank per node, and on Neuron devices only.

    Args:
        plan: The checked configuration of the run.
        environ: Variables of this rank.

    Raises:
        ConfigError: `compile.on_miss=stop`, and the manifest is none.
        BackendError: The same, and there is no manifest, or this node lacks graphs of it.
    """
    watch = _watch_of(plan, environ)
    if watch is None:
        yield
        return
    watch.start()
    try:
        yield
    finally:
        watch.stop()


def _watch_of(plan: Resolved, environ: Mapping[str, str]) -> Watch | NeffWatch | None:
    """Watch of this rank, not yet started; None if the rank watches nothing."""
    config, placement = plan.config, Placement.read(environ)
    if placement.local_rank or not compiles_ahead(config) or extracting(environ):
        return None
    native = is_native(config)
    cache = Cache(cache_folder(config.compile, shared=native))
    for key in cache.break_locks():
        _say(f"broke the lock of {key}, whose owner is gone")
    stops = config.compile.on_miss == "stop"
    world = placement.world
    if native:
        build = native_build_of(plan, world, environ)
    else:
        package = installed("neuronx-cc")
        compiler = f"neuronxcc-{package.version}" if package is not None else ""
        build = build_of(plan, world, environ, compiler)
    parallel = config.parallel
    # No library's order of ranks, which goes within a machine, changes the stages that it holds.
    mesh = Mesh.build(world, placement.rank, tp=parallel.tp, pp=parallel.pp)
    manifest = _manifest_of(config, mesh.stages_held(placement.rank, placement.local_world), cache, stops=stops)
    if manifest is None:
        return None
    different = [f"    {difference}" for difference in differ(manifest.build, build)]
    if different:
        _say("\n".join(["warning: this run is not what was compiled, and may need other graphs:", *different]))
    # Ranks of one node have one parent, the agent, from which all their compilers descend.
    react = _stop if stops else _warn
    on_miss = partial(react, cache, manifest, build)
    expected = {CacheKey(manifest.build.compiler, graph.module) for graph in manifest.graphs}
    if native:
        return NeffWatch(cache, expected, on_miss)
    run = os.getpid()
    if placement.local_world > 1:
        run = os.getppid()
    return Watch(cache.root, expected, run, on_miss)


def _manifest_of(config: RunConfig, stages: Sequence[int], cache: Cache, *, stops: bool) -> GraphManifest | None:
    """Manifest of the stages of this machine; None if it is absent or damaged.

    Args:
        config: The run.
        stages: Pipeline stages of the machine; empty if it holds all.
        cache: The machine's cache.
        stops: Raise errors for an unusable manifest and for missing graphs, instead of warnings.
    """
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


class Watch(threading.Thread):
    """Looks for graphs that a run is compiling though it should not need to.

    Args:
        root: The cache.
        expected: Graphs that it may load, or compile.
        run: The process from which all compilers of the run descend.
        on_miss: Is told of each other graph, once, from this thread.
        patience_s: Seconds for which a lock is given the time to show its compiler.
    """

    def __init__(
        self, root: Path, expected: Collection[CacheKey], run: int, on_miss: OnMiss, patience_s: float = PATIENCE_S
    ) -> None:
        super().__init__(name="nxtrain-compile-guard", daemon=True)
        self._root = root
        self._ancestor = run
        self._on_miss = on_miss
        self._patience_s = patience_s
        self._settled = set(expected)
        self._seen_s: dict[CacheKey, float] = {}
        self._stopped = threading.Event()
        # A lock that is there before the run belongs to somebody else, as long as it is the same.
        self._old: set[tuple[int, int]] = set()
        for folder in self._folders():
            self._old |= {_identity(lock) for lock in locks(folder)}

    def stop(self) -> None:
        """End, now."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self.look()

    def look(self) -> None:
        """Look once."""
        for folder in self._folders():
            key = parse_key(f"{folder.parent.name}/{folder.name}")
            if key is None or key in self._settled:
                continue
            if (folder / DONE).exists():
                self._settled.add(key)
            elif self._is_begun(folder):
                self._judge(key)
            else:
                self._seen_s.pop(key, None)

    def _folders(self) -> Iterator[Path]:
        return self._root.glob("neuronxcc-*/MODULE_*")

    def _is_begun(self, folder: Path) -> bool:
        """True if an entry has a new lock of a compiler; nxtrain's own locks name their owner."""
        for lock in locks(folder):
            with suppress(FileNotFoundError):
                if _identity(lock) not in self._old and not read_owner(lock.read_text(encoding="utf-8")):
                    return True
        return False

    def _judge(self, key: CacheKey) -> None:
        processes = list(naming(key.module))
        ours = [pid for pid in processes if descends(pid, self._ancestor)]
        waited_s = time.monotonic() - self._seen_s.setdefault(key, time.monotonic())
        if ours or (not processes and waited_s > self._patience_s):
            self._settled.add(key)
            self._on_miss(key, ours)


class NeffWatch(threading.Thread):
    """Watch of TorchNeuron's cache for files that a run adds though it should not need to.

    A file appears when its compilation has ended. Nothing tells which process made it: a node's runs need caches of
    their own for `compile.on_miss`.

    Args:
        cache: The cache.
        expected: Graphs of the manifest.
        on_miss: Callback for each other graph, once, from this thread.
    """

    def __init__(self, cache: Cache, expected: Collection[CacheKey], on_miss: OnMiss) -> None:
        super().__init__(name="nxtrain-compile-guard", daemon=True)
        self._cache, self._on_miss = cache, on_miss
        self._settled = {*expected, *cache.done()}
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the watch, after a last look."""
        self._stopped.set()
        self.join()
        self.look()

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self.look()

    def look(self) -> None:
        """Look once."""
        for key in sorted(self._cache.done() - self._settled):
            self._settled.add(key)
            self._on_miss(key, ())


def _stop(cache: Cache, manifest: GraphManifest, build: Build, key: CacheKey, compilers: Sequence[int]) -> None:
    """End this rank, and with it the run, which an agent ends when a rank does."""
    print(f"error: {_miss(manifest, build, key)}", file=sys.stderr, flush=True)
    # Whoever needs the graph next would wait for a lock that nobody holds any more.
    cache.disown(key)
    if compilers:
        # Not before the ranks: one whose compiler is gone would blame that.
        end = f"sleep {AFTERMATH_S}; kill -9 {' '.join(map(str, compilers))}"
        subprocess.Popen(["sh", "-c", end], stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
    os._exit(BackendError.exit_code)


def _warn(cache: Cache, manifest: GraphManifest, build: Build, key: CacheKey, compilers: Sequence[int]) -> None:
    _say(f"warning: {_miss(manifest, build, key)}")


def _miss(manifest: GraphManifest, build: Build, key: CacheKey) -> str:
    return str(explain(manifest, replace(build, compiler=key.compiler), key.module))


def _identity(lock: Path) -> tuple[int, int]:
    try:
        stat = lock.stat()
    except FileNotFoundError:
        return (0, 0)
    return stat.st_ino, stat.st_mtime_ns


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
