"""A graph that was not compiled beforehand, and what sets it apart from those that were.

A run that finds a graph missing compiles it, which takes minutes on every node at once; one that must not ends instead,
and the reader of its message should know what to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nxtrain.compile.manifest import Build, Graph, Manifest
from nxtrain.errors import BackendError


@dataclass(frozen=True)
class Difference:
    """One thing in which a run is not what was compiled.

    Args:
        what: Its name.
        compiled: What it was then.
        needed: What it is now.
    """

    what: str
    compiled: str
    needed: str

    def __str__(self) -> str:
        return f"{self.what}: compiled {self.compiled}, needed {self.needed}"


@dataclass(frozen=True)
class Miss:
    """A graph that was not compiled beforehand.

    Args:
        name: What it computes.
        module: Its key.
        nearest: The compiled graph that is most like it; None if there is none.
        differences: What sets the two apart.
    """

    name: str
    module: str
    nearest: Graph | None
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        lines = [f"the graph {self.name} ({self.module}) was not compiled beforehand"]
        if self.nearest:
            lines.append(f"    nearest: {self.nearest.name} ({self.nearest.module})")
        lines += [f"    {difference}" for difference in self.differences]
        return "\n".join(lines)


@dataclass(frozen=True)
class PrecompiledOnly:
    """The rule of a run that must not compile: a graph outside the manifest ends it.

    Args:
        manifest: What was compiled.
        build: What this run is.
    """

    manifest: Manifest
    build: Build

    def check(self, name: str, module: str) -> None:
        """Let a graph pass if it was compiled beforehand.

        Args:
            name: What it computes.
            module: `MODULE_<graph>+<flags>`.

        Raises:
            BackendError: It was not; the message says what sets it apart.
        """
        miss = explain(self.manifest, self.build, name, module)
        if miss:
            raise BackendError(f"{miss}\n    precompile again with the configuration of this run")


def explain(manifest: Manifest, build: Build, name: str, module: str) -> Miss | None:
    """What sets a graph apart from those that were compiled; None if it is one of them.

    Args:
        manifest: What was compiled.
        build: What the run is.
        name: What the graph computes.
        module: `MODULE_<graph>+<flags>`.
    """
    same_compiler = manifest.build.compiler == build.compiler
    if same_compiler and any(graph.module == module for graph in manifest.graphs):
        return None
    graph_hash, flags_hash = _hashes(module)

    def likeness(graph: Graph) -> tuple[bool, bool, bool]:
        its_graph, its_flags = _hashes(graph.module)
        return its_graph == graph_hash, graph.name == name, its_flags == flags_hash

    nearest = max(manifest.graphs, key=likeness, default=None)
    differences = tuple(_differences(manifest.build, build))
    if nearest and not differences:
        its_graph, its_flags = _hashes(nearest.module)
        differences = (
            Difference("graph", its_graph, f"{graph_hash}; settings and flags are equal, so the code has changed")
            if its_graph != graph_hash
            else Difference("flags", its_flags, f"{flags_hash}; set elsewhere, such as in NEURON_CC_FLAGS"),
        )
    return Miss(name, module, nearest, differences)


def _differences(compiled: Build, needed: Build) -> Iterator[Difference]:
    if compiled.compiler != needed.compiler:
        yield Difference("compiler", compiled.compiler, needed.compiler)
    if compiled.flags != needed.flags:
        yield from _flag_differences(compiled.flags, needed.flags)
    for key in sorted({*compiled.settings, *needed.settings}):
        was, now = (repr(build.settings[key]) if key in build.settings else "nothing" for build in (compiled, needed))
        if was != now:
            yield Difference(key, was, now)


def _flag_differences(compiled: tuple[str, ...], needed: tuple[str, ...]) -> Iterator[Difference]:
    gone = [flag for flag in compiled if flag not in needed]
    new = [flag for flag in needed if flag not in compiled]
    if gone or new:
        yield Difference("flags", " ".join(gone) or "without", " ".join(new) or "without")
    else:
        yield Difference("order of flags", " ".join(compiled), " ".join(needed))


def _hashes(module: str) -> tuple[str, str]:
    graph, _, flags = module.removeprefix("MODULE_").partition("+")
    return graph, flags
