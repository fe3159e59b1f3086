"""What was compiled for a configuration, and whether this node has it.

A manifest is small and is kept with the code, by default as `compile_cache/manifests/<run.name>.json`. The compiler's
key of a graph is `MODULE_<graph>+<flags>`, below the compiler's version: a run finds its graphs only if all three are
what they were.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nxtrain.compile.cache import Cache
from nxtrain.compile.entries import Key, State, parse_key
from nxtrain.compile.location import fill, host_name
from nxtrain.config.schema import RunConfig
from nxtrain.errors import BackendError, ConfigError

_VERSION = 1

Setting = str | int | float | bool


@dataclass(frozen=True)
class Build:
    """What the keys of graphs depend on besides the code of the step.

    Args:
        compiler: Folder of the compiler's version, `neuronxcc-<version>`.
        flags: The compiler's flags, in order, which counts.
        settings: Values of the configuration that shape graphs, by dotted key.
    """

    compiler: str
    flags: tuple[str, ...]
    settings: Mapping[str, Setting]


@dataclass(frozen=True)
class Graph:
    """One compiled graph.

    Args:
        name: What it computes, such as `step 1 (training) #2`: the second new one of that work.
        module: `MODULE_<graph>+<flags>`.
        seconds: Time that its compilation took; None if it was compiled elsewhere.
    """

    name: str
    module: str
    seconds: float | None


@dataclass(frozen=True)
class Manifest:
    """The graphs that a run needs, all compiled by one build.

    Args:
        name: Of the configuration.
        build: What they were compiled by and for.
        graphs: Each of them.
    """

    name: str
    build: Build
    graphs: tuple[Graph, ...]


def manifest_file(config: RunConfig) -> Path:
    """Where the manifest of a run lies, or will.

    Raises:
        ConfigError: `compile.manifest` has an unknown placeholder.
    """
    return Path(fill("compile.manifest", str(config.compile.manifest), {"name": config.run.name}))


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest, in one step and always the same way; nodes that share the folder may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{host_name()}.{os.getpid()}")
    record = {"version": _VERSION, **asdict(manifest)}
    draft.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    draft.replace(path)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ConfigError: It is missing, or no manifest.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; nxtrain compile writes it") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    try:
        manifest = _from_json(record)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no manifest of compiled graphs ({error!r}); precompile again") from error
    bad = [graph.module for graph in manifest.graphs if not parse_key(f"{manifest.build.compiler}/{graph.module}")]
    if bad or record.get("version") != _VERSION:
        what = f"{bad[0]!r} is no key of a graph" if bad else f"version {record.get('version')}, not {_VERSION}"
        raise ConfigError(f"{path} is no manifest that this release reads: {what}; precompile again")
    return manifest


def check_ready(manifest: Manifest, cache: Cache) -> None:
    """Make sure, before a run, that this node has every graph, and note that they are in use.

    Raises:
        BackendError: Graphs are missing here, or not done; each with its state.
    """
    keys = {graph: Key(manifest.build.compiler, graph.module) for graph in manifest.graphs}
    found = {graph: cache.entry(key) for graph, key in keys.items()}
    lacking = [
        f"    {graph.name} ({graph.module}): {entry.state.value if entry else 'absent'}"
        for graph, entry in found.items()
        if entry is None or entry.state is not State.DONE
    ]
    if lacking:
        raise BackendError(
            f"{cache} lacks {len(lacking)} of the {len(keys)} graphs of {manifest.name}, {manifest.build.compiler}:\n"
            + "\n".join(lacking)
            + f"\n    on this node: nxtrain compile CONFIG, or fetch them: nxtrain cache sync SRC {cache}"
        )
    cache.mark_used(keys.values())


def _from_json(record: Mapping[str, Any]) -> Manifest:
    build = record["build"]
    return Manifest(
        name=str(record["name"]),
        build=Build(str(build["compiler"]), tuple(map(str, build["flags"])), dict(build["settings"])),
        graphs=tuple(map(_graph, record["graphs"])),
    )


def _graph(row: Mapping[str, Any]) -> Graph:
    seconds = row["seconds"]
    return Graph(str(row["name"]), str(row["module"]), None if seconds is None else float(seconds))
