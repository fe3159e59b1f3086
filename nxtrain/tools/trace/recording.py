"""Recorded graphs of the traced ranks, and the part of the training step that each graph computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nxtrain.common.mesh import Axis
from nxtrain.tools.trace.hlo import Groups, HloGraph

# Phases of the training loop in which graphs are submitted.
TRAINING = "training"
LOG = "log"
EVALUATION = "evaluation"


@dataclass(frozen=True)
class Cut:
    """One submission of a graph to the device by a rank.

    Args:
        action: Action of the rank's pipeline, such as `forward chunk 1` or `transfer`; empty outside the pipeline.
    """

    rank: int
    step: int  # training step of the submission, from 1
    phase: str  # phase of the training loop, such as `TRAINING`
    hash: str  # torch-xla's hash, which decides whether the graph is compiled again
    action: str = ""


@dataclass(frozen=True)
class Read:
    """Read of a device value by the host inside a training step."""

    rank: int
    step: int
    file: str  # innermost line outside torch and torch-xla
    line: int
    function: str


@dataclass(frozen=True)
class Recording:
    """Submitted graphs and host reads of all traced ranks.

    Args:
        stages: Pipeline stage of each traced rank; empty if there is only one stage.
    """

    world: int
    ranks: Sequence[int]
    steps: int
    copies: int  # number of dp x cp ranks, over which gradients are averaged
    axes: Sequence[Axis]  # mesh axes over which ranks may communicate; of axes with equal groups, the first counts
    cuts: Sequence[Cut]  # submissions of graphs in the order of recording
    graphs: Mapping[str, HloGraph]  # contents of the graphs by hash
    reads: Sequence[Read]
    stages: Mapping[int, int] = field(default_factory=dict)

    def parts(self) -> list[tuple[Cut, str]]:
        """Submissions of graphs, each with the name of the part of the step that the graph computes.

        Without a pipeline, a step is one graph, or graphs of micro-batches followed by an update. With a pipeline, a
        step has pipeline actions, graphs that all stages share, and graphs of single stages.
        """
        per_step = Counter((cut.rank, cut.step) for cut in self.cuts if cut.phase == TRAINING)
        seen: Counter[tuple[int, int]] = Counter()
        alone: Counter[tuple[int, int, str, str]] = Counter()
        named = []
        hidden_bytes = max((self._num_bytes(cut.hash) for cut in self.cuts if cut.action), default=0)
        for cut in self.cuts:
            key, part = (cut.rank, cut.step), cut.phase
            if cut.phase == TRAINING:
                seen[key] += 1
            last = seen[key] == per_step[key]
            if self.stages:
                part = self._pipeline_part(cut, last=last)
                if part.startswith("transfer ") and self._num_bytes(cut.hash) < hidden_bytes:
                    part = f"{part} of the routing"
                if not cut.action:
                    work = (*key, cut.phase, part)
                    alone[work] += 1
                    if alone[work] > 1:
                        part += f" {alone[work]}"
            elif cut.phase == TRAINING and per_step[key] == 1:
                part = "steady"
            elif cut.phase == TRAINING and last:
                part = "steady update"
            elif cut.phase == TRAINING:
                part = "steady micro-batch"
            named.append((cut, part))
        return named

    def _pipeline_part(self, cut: Cut, *, last: bool) -> str:
        prefix = ""
        if cut.phase != TRAINING:
            prefix = f"{cut.phase} "
        shared = self.shared(cut.hash)
        if shared:
            (over,) = {axis.name for axis in shared}
            if cut.action:
                return f"transfer over {over}"
            ops = {collective.op for collective in self.graphs[cut.hash].collectives}
            if ops == {"all-gather"}:
                return f"{prefix}exchange of the first and last stage"  # of a tied embedding
            return f"{prefix}sum over {over}"
        if cut.action:
            return prefix + cut.action
        if cut.phase == EVALUATION:
            return f"{prefix}sums"
        if cut.phase != TRAINING:
            return cut.phase
        if last:
            return "update"
        return "gradients"

    def _num_bytes(self, hash_: str) -> int:
        """Bytes of a graph's collectives if the graph is a transfer between stages, else 0."""
        if not self.shared(hash_):
            return 0
        return sum(collective.num_bytes for collective in self.graphs[hash_].collectives)

    def shared(self, hash_: str) -> list[Axis]:
        """Axes of a graph's collectives, if all collectives use one axis that spans several stages; otherwise empty."""
        joined = self.joined(hash_)
        is_all = len(joined) == len(self.graphs[hash_].collectives)
        if is_all and len({axis.name for axis in joined}) == 1:
            return joined
        return []

    def joined(self, hash_: str) -> list[Axis]:
        """Axes of those collectives of a graph that span several pipeline stages."""
        axes = [self._axis(collective.op, collective.groups) for collective in self.graphs[hash_].collectives]
        return [axis for axis in axes if axis is not None and axis.spans_stages]

    def stage_of(self, rank: int) -> int:
        """Pipeline stage of a traced rank."""
        return self.stages.get(rank, 0)

    def by_stage(self) -> list[list[int]]:
        """Traced ranks in order, grouped by pipeline stage."""
        groups: dict[int, list[int]] = {}
        for rank in self.ranks:
            groups.setdefault(self.stage_of(rank), []).append(rank)
        return [groups[stage] for stage in sorted(groups)]

    def axis_of(self, op: str, groups: Groups) -> str:
        """Name of the mesh axis whose groups a collective has; empty if no axis has these groups."""
        axis = self._axis(op, groups)
        if axis is None:
            return ""
        return axis.name

    def _axis(self, op: str, groups: Groups) -> Axis | None:
        for axis in self.axes:
            if op == "collective-permute":
                group_of: dict[int, int] = {}
                for index, group in enumerate(axis.groups):
                    group_of |= dict.fromkeys(group, index)
                if all(group_of[source] == group_of[target] for source, target in groups):
                    return axis
            elif groups == axis.groups or sorted(groups or (tuple(range(self.world)),)) == sorted(axis.groups):
                return axis
        return None
