"""What was recorded on some ranks, put in order, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nxtrain.graphs.hlo import Graph, Groups
from nxtrain.mesh import Axis

TRAINING, LOG, EVALUATION = "training", "log", "evaluation"
"""What a graph belongs to."""


@dataclass(frozen=True)
class Cut:
    """A graph that a rank handed over.

    Args:
        rank: Who.
        step: When, from 1.
        phase: What the loop was at, `TRAINING` and so on.
        hash: torch-xla's, which decides whether it is compiled again.
    """

    rank: int
    step: int
    phase: str
    hash: str


@dataclass(frozen=True)
class Read:
    """A value of the device that the host asked for inside a step.

    Args:
        rank, step: Who and when.
        file, line, function: The innermost line outside torch and torch-xla.
    """

    rank: int
    step: int
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Recording:
    """All that was recorded.

    Args:
        world: Ranks of the world.
        ranks: Those that were traced, in order.
        steps: Steps of each.
        dp_size: Data parallel ranks.
        axes: Axes whose ranks may communicate; of two with equal groups the first gives its name.
        cuts: In the order of recording.
        graphs: What is in them, by hash.
        reads: In the order of recording.
    """

    world: int
    ranks: Sequence[int]
    steps: int
    dp_size: int
    axes: Sequence[Axis]
    cuts: Sequence[Cut]
    graphs: Mapping[str, Graph]
    reads: Sequence[Read]

    def parts(self) -> list[tuple[Cut, str]]:
        """What each cut does: a step is one graph, or micro-batches and then an update."""
        per_step = Counter((cut.rank, cut.step) for cut in self.cuts if cut.phase == TRAINING)
        seen: Counter[tuple[int, int]] = Counter()
        named = []
        for cut in self.cuts:
            key, part = (cut.rank, cut.step), cut.phase
            if cut.phase == TRAINING:
                seen[key] += 1
                last = seen[key] == per_step[key]
                part = "steady" if per_step[key] == 1 else "steady update" if last else "steady micro-batch"
            named.append((cut, part))
        return named

    def axis_of(self, op: str, groups: Groups) -> str:
        """Name of the axis that a collective spans; empty if there is none."""
        for axis in self.axes:
            if op == "collective-permute":
                group_of = {rank: index for index, group in enumerate(axis.groups) for rank in group}
                if all(group_of[source] == group_of[target] for source, target in groups):
                    return axis.name
            elif sorted(groups or (tuple(range(self.world)),)) == sorted(axis.groups):
                return axis.name
        return ""


def report(recording: Recording) -> dict[str, Any]:
    """The JSON of `nxtrain graphs`."""
    names = _names(recording)
    graphs = [_entry(recording, hash_, name) for hash_, name in names.items()]
    return {
        "world": recording.world,
        "rank": recording.ranks[0],
        "ranks": list(recording.ranks),
        "steps": recording.steps,
        "distinct_graphs": len(graphs),
        "graphs": graphs,
        "host_reads": [asdict(read) for read in recording.reads],
        "problems": list(_problems(recording, names, graphs)),
    }


def _names(recording: Recording) -> dict[str, str]:
    """By hash, in order of first use; what a part needs at last has its plain name."""
    parts = recording.parts()
    last = {(cut.rank, part): cut.hash for cut, part in parts}
    names: dict[str, str] = {}
    for cut, part in parts:
        if cut.hash in names:
            continue
        steps = {other.step for other in recording.cuts if other.hash == cut.hash}
        if cut.hash == last[cut.rank, part]:
            names[cut.hash] = part
        else:
            rest = [word for word in part.split() if word != "steady"]
            names[cut.hash] = " ".join(["first", *rest]) if steps == {1} else f"other {part}"
    return names


def _entry(recording: Recording, hash_: str, name: str) -> dict[str, Any]:
    graph = recording.graphs[hash_]
    cuts = [cut for cut in recording.cuts if cut.hash == hash_]
    count: Counter[tuple[str, Groups]] = Counter()
    num_bytes: Counter[tuple[str, Groups]] = Counter()
    for collective in graph.collectives:
        key = collective.op, collective.groups
        count[key] += 1
        num_bytes[key] += collective.num_bytes
    collectives = [
        {
            "op": op,
            "count": number,
            "group_size": len(groups[0]) if groups else recording.world,
            "num_groups": len(groups) or 1,
            "bytes": num_bytes[op, groups],
            "axis": recording.axis_of(op, groups),
        }
        for (op, groups), number in count.items()
    ]
    return {
        "name": name,
        "hash": hash_,
        "steps": sorted({cut.step for cut in cuts}),
        "ranks": sorted({cut.rank for cut in cuts}),
        "collectives": collectives,
        "dp_scale": _dp_scale(recording, graph),
        "f64": graph.has_f64,
    }


def _dp_scale(recording: Recording, graph: Graph) -> float | None:
    """The constant that sums over data parallel ranks are multiplied by; of several the one that is wrong."""
    data_parallel = ("dp", "shard", "replica")
    scales = {
        scale
        for collective in graph.collectives
        if recording.axis_of(collective.op, collective.groups) in data_parallel
        for scale in collective.scales
    }
    return max(scales, key=lambda scale: abs(scale * recording.dp_size - 1), default=None)


def _problems(recording: Recording, names: Mapping[str, str], graphs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from _disagreements(recording)
    yield from _recompilations(recording)
    for graph in graphs:
        yield from _wrong_groups(recording, graph)
        scale, dp = graph["dp_scale"], recording.dp_size
        if scale is not None and abs(scale * dp - 1) > 2**-8:  # bf16 has 8 significant bits
            yield f"{graph['name']}: sums over dp are multiplied by {scale:g}; the mean of {dp} ranks needs {1 / dp:g}"
        if graph["f64"]:
            yield (
                f"{graph['name']}: computes in float64, which Trainium does not have; a number in an operation with a "
                "float32 tensor may do that: make it a tensor"
            )
    for file, line, function in dict.fromkeys((read.file, read.line, read.function) for read in recording.reads):
        yield (
            f"{file}:{line}: {function} reads a value of the device inside a step, which makes the host wait and cuts "
            "the graph; keep it on the device, and read it with Backend.fetch where the trainer logs"
        )


def _disagreements(recording: Recording) -> Iterator[str]:
    """Ranks whose graphs are not those of the first: each would be compiled again, and their collectives not meet."""
    parts = recording.parts()
    course = {rank: [(c.step, part, c.hash) for c, part in parts if c.rank == rank] for rank in recording.ranks}
    first, *others = recording.ranks
    different = [rank for rank in others if course[rank] != course[first]]
    if not different:
        return
    ours, theirs = course[first], course[different[0]]
    step, part, _ = next((mine for mine, other in zip(ours, theirs, strict=False) if mine != other), (0, "", ""))
    where = f"the first difference is {part} in step {step}" if step else "some records fewer than others"
    yield (
        f"ranks {', '.join(map(str, different))} record other graphs than rank {first}; {where}. A number that depends "
        "on the rank stands in the graph: make it a tensor on the device"
    )


def _recompilations(recording: Recording) -> Iterator[str]:
    """Parts that need more than one graph, on the first rank that shows it."""
    for part in dict.fromkeys(part for _, part in recording.parts()):
        for rank in recording.ranks:
            cuts = [cut for cut, of in recording.parts() if of == part and cut.rank == rank]
            number = len({cut.hash for cut in cuts})
            if number > 1:
                again = next(cut for cut in cuts if cut.hash != cuts[0].hash)
                when = "step 1, where one micro-batch differs from another" if again.step == 1 else f"step {again.step}"
                yield (
                    f"{part}: compiled again in {when}: {number} graphs where one is enough. A number that changes "
                    "stands in the graph, or a tensor that is there only later: bring numbers to the device with "
                    "Backend.scalars, and make tensors before the first step"
                )
                break


def _wrong_groups(recording: Recording, graph: Mapping[str, Any]) -> Iterator[str]:
    known = ", ".join(f"{axis.name} of {axis.size}" for axis in recording.axes) or "none, since it has one rank"
    for row in graph["collectives"]:
        if not row["axis"]:
            yield (
                f"{graph['name']}: {row['count']} x {row['op']} over {row['num_groups']} groups of {row['group_size']} "
                f"ranks, which are no axis of this mesh; its axes: {known}"
            )
