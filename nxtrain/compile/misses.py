"""A graph that was not compiled beforehand, and what sets it apart from those that were.

A run that finds a graph missing compiles it, which takes minutes on every node at once; one that must not ends instead,
and the reader of its message should know what to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nxtrain.compile.manifest import Build, Graph, Manifest


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
        module: Its key.
        sibling: The same graph as it was compiled, with other flags; None if it was not.
        differences: In what the run is not what was compiled; empty if nothing is known.
    """

    module: str
    sibling: Graph | None
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        lines = [f"the graph {self.module} was not compiled beforehand"]
        if self.sibling:
            lines.append(f"it is {self.sibling.name} with other flags ({self.sibling.module})")
        lines += map(str, self.differences)
        if not self.differences:
            lines.append(
                "compiler, flags and settings are equal: the code has changed since, or only the run reaches this graph"
            )
        lines.append("precompile again with the configuration of this run: nxtrain compile CONFIG")
        return "\n    ".join(lines)


def explain(manifest: Manifest, build: Build, module: str) -> Miss | None:
    """What sets a graph apart from those that were compiled; None if it is one of them.

    Args:
        manifest: What was compiled.
        build: What the run is.
        module: `MODULE_<graph>+<flags>`.
    """
    same_compiler = manifest.build.compiler == build.compiler
    if same_compiler and any(graph.module == module for graph in manifest.graphs):
        return None
    graph_hash, flags_hash = _hashes(module)
    known = [(*_hashes(graph.module), graph) for graph in manifest.graphs]
    sibling = next((graph for its_graph, its_flags, graph in known if its_graph == graph_hash), None)
    differences = tuple(differ(manifest.build, build))
    flags = sorted({its_flags for _, its_flags, _ in known})
    if not differences and flags and flags_hash not in flags:
        differences = (Difference("flags", " ".join(flags), f"{flags_hash}; set elsewhere, such as in a script"),)
    return Miss(module, sibling if same_compiler else None, differences)


def differ(compiled: Build, needed: Build) -> Iterator[Difference]:
    """Each thing in which two builds differ.

    Args:
        compiled: That of the manifest.
        needed: That of the run; an empty compiler is one that is not known yet.
    """
    if needed.compiler and compiled.compiler != needed.compiler:
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
