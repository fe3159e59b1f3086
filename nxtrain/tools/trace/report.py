"""Report of `nxtrain graphs`: the recorded graphs in order, and the problems found in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from nxtrain.common.mesh import spans
from nxtrain.tools.trace.hlo import Groups
from nxtrain.tools.trace.recording import Cut, Recording


def report(recording: Recording) -> dict[str, Any]:
    """Build the report of `nxtrain graphs` as JSON types."""
    names = _names(recording)
    graphs = [_entry(recording, hash_, name) for hash_, name in names.items()]
    return {
        "world": recording.world,
        "rank": recording.ranks[0],
        "ranks": list(recording.ranks),
        "stages": len(recording.by_stage()),
        "steps": recording.steps,
        "distinct_graphs": len(graphs),
        "graphs": graphs,
        "host_reads": [asdict(read) for read in recording.reads],
        "problems": list(_problems(recording, names, graphs)),
    }


def _names(recording: Recording) -> dict[str, str]:
    """Names of the graphs by hash, in order of first use.

    The last graph of a part of the step has the part's name. Other graphs of the part have a prefix, `first` or
    `other`.
    """
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
            names[cut.hash] = f"other {part}"
            if steps == {1}:
                rest = [word for word in part.split() if word != "steady"]
                names[cut.hash] = " ".join(["first", *rest])
    if recording.stages:
        return {hash_: _staged(recording, parts, hash_, name) for hash_, name in names.items()}
    return names


def _staged(recording: Recording, parts: Sequence[tuple[Cut, str]], hash_: str, name: str) -> str:
    """Name of a graph, extended by the pipeline stages that run it and its part of the step there.

    A graph that all stages share keeps its plain name.
    """
    if recording.shared(hash_):
        return name
    uses: dict[str, tuple[str, set[int]]] = {}  # name and stages, by part without its number
    for cut, part in parts:
        if cut.hash != hash_:
            continue
        label = name
        if uses:
            label = part
        work = part
        if not cut.action:
            work = part.rstrip(" 0123456789")
        _, stages = uses.setdefault(work, (label, set()))
        stages.add(recording.stage_of(cut.rank))
    return ", ".join(f"stage{'s' * (len(stages) > 1)} {spans(sorted(stages))} {of}" for of, stages in uses.values())


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
    data_parallel = ("dp", "dpxcp", "cp", "shard", "replica", "expert_copies", "expert_shard", "expert_replica")
    scales: set[float] = set()
    for collective in graph.collectives:
        if recording.axis_of(collective.op, collective.groups) in data_parallel:
            scales |= collective.scales
    return {
        "name": name,
        "hash": hash_,
        "steps": sorted({cut.step for cut in cuts}),
        "ranks": sorted({cut.rank for cut in cuts}),
        "stages": sorted({recording.stage_of(cut.rank) for cut in cuts}),
        "collectives": collectives,
        # Constant factor of the sums over dp x cp ranks; of several factors, the one furthest from a mean.
        "dp_scale": max(scales, key=lambda scale: abs(scale * recording.copies - 1), default=None),
        "f64": graph.has_f64,
    }


def _problems(recording: Recording, names: Mapping[str, str], graphs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for ranks in recording.by_stage():
        yield from _rank_mismatches(recording, ranks)
    yield from _stage_mismatches(recording, names)
    yield from _recompilations(recording)
    axes = ", ".join(f"{axis.name} of {axis.size}" for axis in recording.axes) or "none, since it has one rank"
    for graph in graphs:
        for row in graph["collectives"]:
            if not row["axis"]:
                yield (
                    f"{graph['name']}: {row['count']} x {row['op']} over {row['num_groups']} groups of "
                    f"{row['group_size']} ranks, which are not an axis of this mesh; its axes: {axes}"
                )
        scale, dp = graph["dp_scale"], recording.copies
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


def _rank_mismatches(recording: Recording, ranks: Sequence[int]) -> Iterator[str]:
    """Problems of ranks whose graphs differ from those of their stage's first rank, so that collectives would hang."""
    parts = recording.parts()
    course: dict[int, list[tuple[int, str, str]]] = {rank: [] for rank in ranks}
    for cut, part in parts:
        if cut.rank in course:
            course[cut.rank].append((cut.step, part, cut.hash))
    first, *others = ranks
    different = [rank for rank in others if course[rank] != course[first]]
    if not different:
        return
    ours, theirs = course[first], course[different[0]]
    where = "some records fewer than others"
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            where = f"the first difference is {mine[1]} in step {mine[0]}"
            break
    yield (
        f"ranks {', '.join(map(str, different))} record other graphs than rank {first}; {where}. A number that depends "
        "on the rank is a constant in the graph: make it a tensor on the device"
    )


def _stage_mismatches(recording: Recording, names: Mapping[str, str]) -> Iterator[str]:
    """Problems of collectives between pipeline stages whose graphs differ, so that the collectives would hang.

    Such a collective must be in a graph that every stage runs, in the same order.
    """
    if not recording.stages:
        return
    alike: dict[tuple[str, tuple[tuple[str, Groups, int], ...]], str] = {}
    for hash_, name in names.items():
        joined = recording.joined(hash_)
        if not joined:
            continue
        if not recording.shared(hash_):
            yield f"{name}: a collective over {joined[0].name} is in a graph that not all stages run"
            continue
        collectives = recording.graphs[hash_].collectives
        what = name, tuple((one.op, one.groups, one.num_bytes) for one in collectives)
        if alike.setdefault(what, hash_) != hash_:
            here, there = _stages(recording, hash_), _stages(recording, alike[what])
            yield f"{name}: is another graph on stages {here} than {there}"
    courses: dict[int, list[tuple[int, str, list[str]]]] = {}
    for rank, *_ in recording.by_stage():
        courses[rank] = []
        for (step, phase), cuts in groupby(_sums(recording, rank), key=lambda cut: (cut.step, cut.phase)):
            courses[rank].append((step, phase, [cut.hash for cut in cuts]))
    first, *others = courses
    different = [rank for rank in others if courses[rank] != courses[first]]
    if different:
        yield f"ranks {spans(different)} sum over other ranks, or in another order, than rank {first} of another stage"


def _sums(recording: Recording, rank: int) -> Iterator[Cut]:
    for cut in recording.cuts:
        ops = {collective.op for collective in recording.graphs[cut.hash].collectives}
        if cut.rank == rank and not cut.action and "all-reduce" in ops and recording.joined(cut.hash):
            yield cut


def _stages(recording: Recording, hash_: str) -> str:
    return spans(sorted({recording.stage_of(cut.rank) for cut in recording.cuts if cut.hash == hash_}))


def _recompilations(recording: Recording) -> Iterator[str]:
    """Problems of step parts that need more than one graph, each on the first rank that shows the problem."""
    parts = recording.parts()
    for part in dict.fromkeys(part for _, part in parts):
        for rank in recording.ranks:
            cuts = [cut for cut, of in parts if of == part and cut.rank == rank]
            number = len({cut.hash for cut in cuts})
            if number > 1:
                again = next(cut for cut in cuts if cut.hash != cuts[0].hash)
                when = f"step {again.step}"
                if again.step == 1:
                    when += ", where one micro-batch differs from another"
                yield (
                    f"{part}: compiled again in {when}: {number} graphs where one is enough. A number that changes "
                    "is a constant in the graph, or a tensor exists only in later steps: move numbers to the device "
                    "with Backend.scalars, and create tensors before the first step"
                )
                break
