"""Manifest of the graphs compiled for a configuration, and explanation of graphs that are missing in it.

A manifest is a small file that is kept with the code, by default `compile_cache/manifests/<run.name>.json`. The
compiler's key of a graph is `MODULE_<graph>+<flags>`, below the compiler's version. So a run finds its graphs only if
graph, flags and compiler version are equal.

A machine that holds only some pipeline stages has a manifest of these stages, `<run.name>.stages-<stages>.json`.
Machines with the same stages compile the same graphs and write the same file. So manifests need no merging and no file
locks, on shared folders as on local ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from glob import escape
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nxtrain.common.errors import BackendError, ConfigError, cause_of
from nxtrain.common.io.atomic import replace_text
from nxtrain.common.io.regular import read_text
from nxtrain.common.mesh import spans
from nxtrain.config.cache_dir import fill
from nxtrain.config.schema import RunConfig
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.entries import CacheKey, EntryState, parse_key

_VERSION = 1

Setting = str | int | float | bool


@dataclass(frozen=True)
class Build:
    """Inputs of the graphs' cache keys besides the code: compiler, ordered flags, and settings by dotted key."""

    compiler: str
    flags: tuple[str, ...]
    settings: dict[str, Setting]


@dataclass(frozen=True)
class CompiledGraph:
    """One compiled graph of a manifest.

    Args:
        name: Part of the run that uses the graph, with the graph's number in that part: `step 1 (training) #2`.
        module: `MODULE_<graph>+<flags>`.
        seconds: Duration of the compilation in seconds; None if the graph was compiled elsewhere.
    """

    name: str
    module: str
    seconds: float | None


@dataclass(frozen=True)
class GraphManifest:
    """All graphs that a run needs, compiled with the same compiler, flags and settings.

    `stages` lists the pipeline stages; it is empty for all stages.
    """

    name: str
    build: Build
    graphs: tuple[CompiledGraph, ...]
    stages: tuple[int, ...] = ()

    @property
    def keys(self) -> list[CacheKey]:
        """Cache keys of the graphs, in the order of `graphs`."""
        return [CacheKey(self.build.compiler, graph.module) for graph in self.graphs]

    @property
    def title(self) -> str:
        """Name of the manifest in messages, with its pipeline stages."""
        if not self.stages:
            return self.name
        return f"{self.name}, {describe_stages(self.stages, self.build.settings['parallel.pp'])}"


def describe_stages(stages: Sequence[int], total: Setting) -> str:
    """Format pipeline stages for messages, such as `pipeline stages 0-3 of 8`."""
    if len(stages) > 1:
        return f"pipeline stages {spans(stages)} of {total}"
    return f"pipeline stage {spans(stages)} of {total}"


def manifest_file(config: RunConfig, stages: Sequence[int] = ()) -> Path:
    """Path of a run's manifest; the file need not exist yet.

    Args:
        stages: Pipeline stages of this machine; empty for all stages.
    """
    file = Path(fill("compile.manifest", str(config.compile.manifest), {"name": config.run.name}))
    if not stages:
        return file
    return file.with_name(f"{file.stem}.stages-{spans(stages).replace(', ', '_')}{file.suffix}")


def other_manifests(config: RunConfig, file: Path) -> list[Path]:
    """Existing manifests of a run for other pipeline stages than those of `file`, or for all stages."""
    whole = manifest_file(config)
    files = {whole, *whole.parent.glob(f"{escape(whole.stem)}.stages-*{escape(whole.suffix)}")}
    return sorted(path for path in files - {file} if path.exists())


def write_manifest(manifest: GraphManifest, path: Path) -> None:
    """Write a manifest atomically and deterministically, so that nodes with a shared folder can write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"version": _VERSION, **asdict(manifest)}
    replace_text(path, json.dumps(record, indent=2, sort_keys=True) + "\n", durable=False, shared=True)


def read_manifest(path: Path) -> GraphManifest:
    """Read a manifest file.

    Raises:
        ConfigError: The file is missing, damaged or of another version.
    """
    try:
        record = json.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; nxtrain compile writes it") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not valid JSON: {cause_of(error)}; run nxtrain compile again") from error
    try:
        manifest = TypeAdapter(GraphManifest).validate_python(record)
    except ValidationError as error:
        problem = error.errors()[0]
        reason = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        raise ConfigError(f"{path} is not a manifest of graphs ({reason}); run nxtrain compile again") from error
    what = ""
    for key in manifest.keys:
        if parse_key(str(key)) is None:
            what = f"{key.module!r} is not a key of a graph"
    if not what and record.get("version") != _VERSION:
        what = f"version {record.get('version')}, not {_VERSION}"
    if what:
        raise ConfigError(f"{path} is not a manifest that this release reads: {what}; run nxtrain compile again")
    return manifest


def check_ready(manifest: GraphManifest, cache: Cache) -> None:
    """Check before a run that the node's cache has every graph of the manifest, and mark the graphs as used.

    Raises:
        BackendError: Graphs are missing.
    """
    lacking = []
    for graph, key in zip(manifest.graphs, manifest.keys, strict=True):
        entry = cache.entry(key)
        if entry is None:
            lacking.append(f"    {graph.name} ({graph.module}): absent")
        elif entry.state is not EntryState.DONE:
            lacking.append(f"    {graph.name} ({graph.module}): {entry.state.value}")
    if lacking:
        total = len(manifest.graphs)
        raise BackendError(
            f"{cache} lacks {len(lacking)} of the {total} graphs of {manifest.title}, {manifest.build.compiler}:\n"
            + "\n".join(lacking)
            + f"\n    on this node: nxtrain compile CONFIG, or fetch them: nxtrain cache sync SRC {cache}"
        )
    cache.mark_used(manifest.keys)


def explain(manifest: GraphManifest, build: Build, key: CacheKey) -> str:
    """Explain why a graph was not compiled beforehand, as differences from the manifest in text."""
    lines = [f"the graph {key.module} was not compiled beforehand"]
    graph_hash, flags_hash = _hashes(key.module)
    for graph in manifest.graphs:
        if key.compiler == manifest.build.compiler and _hashes(graph.module)[0] == graph_hash:
            lines.append(f"it is {graph.name} with other flags ({graph.module})")
            break
    differences = list(differ(manifest.build, replace(build, compiler=key.compiler)))
    flags = sorted({_hashes(graph.module)[1] for graph in manifest.graphs})
    if not differences and flags and flags_hash not in flags:
        compiled = " ".join(flags)
        differences.append(f"flags: compiled {compiled}, needed {flags_hash}; set elsewhere, such as in a script")
    if not differences:
        equal = "compiler, flags and settings are equal"
        differences.append(f"{equal}: the code has changed since, or only the run reaches this graph")
    advice = "precompile again with the configuration of this run: nxtrain compile CONFIG"
    return "\n    ".join([*lines, *differences, advice])


def differ(compiled: Build, needed: Build) -> Iterator[str]:
    """Describe each difference between the compiled and the needed build as text.

    An empty compiler in `needed` means that the compiler is unknown, and is not compared.
    """
    if needed.compiler and compiled.compiler != needed.compiler:
        yield f"compiler: compiled {compiled.compiler}, needed {needed.compiler}"
    if compiled.flags != needed.flags:
        gone = [flag for flag in compiled.flags if flag not in needed.flags]
        new = [flag for flag in needed.flags if flag not in compiled.flags]
        if gone or new:
            yield f"flags: compiled {' '.join(gone) or 'without'}, needed {' '.join(new) or 'without'}"
        else:
            yield f"order of flags: compiled {' '.join(compiled.flags)}, needed {' '.join(needed.flags)}"
    for key in sorted({*compiled.settings, *needed.settings}):
        was = _shown(compiled, key)
        now = _shown(needed, key)
        if was != now:
            yield f"{key}: compiled {was}, needed {now}"


def _shown(build: Build, key: str) -> str:
    if key not in build.settings:
        return "nothing"
    return repr(build.settings[key])


def _hashes(module: str) -> tuple[str, str]:
    graph, _, flags = module.removeprefix("MODULE_").partition("+")
    return graph, flags
