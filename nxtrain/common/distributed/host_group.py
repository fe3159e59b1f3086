"""Communication between hosts over gloo, for runs whose default process group carries device tensors only."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from nxtrain.common.distributed.failures import first_line
from nxtrain.common.errors import BackendError, HangError, LostPeerError
from nxtrain.common.mesh import Axis, spans
from nxtrain.common.process.greetings import suppress_gloo_messages
from nxtrain.common.process.placement import Placement
from nxtrain.common.text import indented

SHOWN_DIGITS = 12
"""Digits of a graph's hash in messages; `nxtrain graphs` shows the same number."""

SOONER = 0.9
"""Share of the timeout before which a failed barrier means a dead rank instead of a late one."""

_MISSING = re.compile(r"\b[Rr]anks? (\d+(?:, \d+)*) failed to pass")


class HostGroup:
    """A gloo process group of all ranks for barriers and comparisons.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, hang_timeout_s: float) -> None:
        self._timeout = timedelta(seconds=hang_timeout_s)
        with suppress_gloo_messages():
            group = dist.new_group(backend="gloo", timeout=self._timeout)
        assert group is not None, "every rank is a member"
        self.group: dist.ProcessGroup = group
        self._alike: dist.ProcessGroup = group

    def compare_among(self, axis: Axis) -> None:
        """Limit later calls of `compare` to this rank's group of an axis, whose ranks run the same graphs."""
        ranks = [list(group) for group in axis.groups]
        with suppress_gloo_messages():
            self._alike, _ = dist.new_subgroups_by_enumeration(ranks, timeout=self._timeout, backend="gloo")

    def barrier(self, work: str = "a barrier") -> None:
        """Wait until every rank has called `barrier`; `work` names the barrier in error messages."""
        self._meet(self.group, work)

    def _meet(self, group: dist.ProcessGroup, work: str) -> None:
        began, limit_s = time.monotonic(), self._timeout.total_seconds()
        try:
            dist.monitored_barrier(group, self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            reason = in_world(first_line(error).rstrip("."), dist.get_process_group_ranks(group))
            # Only the first rank of a group gets the names; the others lose that rank.
            named = _MISSING.search(reason)
            missing = [int(rank) for rank in named[1].split(", ")] if named else []
            nodes = Placement.read().on_nodes(missing) if missing else ""
            if time.monotonic() - began >= SOONER * limit_s:
                raise HangError(
                    f"some ranks are missing at {work}, where the others wait for {limit_s:g} seconds, as long as "
                    f"recovery.hang_timeout_s allows while graphs compile: {reason}{nodes}. A missing rank "
                    "crashed, or runs other work than the rest; the last lines of its log show more"
                ) from error
            # gloo's error is the same for a rank that is gone.
            gone, first = "another rank of this rank's process group is", None
            if missing:
                gone, first = f"rank {missing[0]}{nodes} is", missing[0]
            if len(missing) > 1:
                gone = f"ranks {spans(missing)}{nodes} are"
            raise LostPeerError(
                f"{gone} gone, which the others wait for at {work}: {reason}. Its process crashed or exited early; "
                "the last lines of its log show why",
                first,
            ) from error

    def compare(self, work: str, graph: str) -> None:
        """Check that all ranks with the same program run the same graph next; the first rank reports any difference."""
        self._meet(self._alike, f"the comparison of graphs in {work}")
        members = dist.get_process_group_ranks(self._alike)
        graphs: list[tuple[str, str]] = [("", "")] * len(members)
        dist.all_gather_object(graphs, (work, graph), group=self._alike)
        problem = disagreement(dict(zip(members, graphs, strict=True)), dist.get_world_size(self.group))
        if problem:
            first = members[0]
            see = f"ranks are about to run different graphs in {work}; see rank {first}"
            raise BackendError(problem if dist.get_rank() == first else see)


def disagreement(graphs: Mapping[int, tuple[str, str]], world: int) -> str:
    """Error message for ranks whose next graphs differ; empty if all ranks agree.

    Args:
        graphs: Section of work and graph hash of each rank, ranks ascending.
        world: Number of ranks of the run.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, seen in graphs.items():
        ranks_of.setdefault(seen, []).append(rank)
    if len(ranks_of) == 1:
        return ""
    lines = [
        f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}: {work}, {graph[:SHOWN_DIGITS] or 'no graph'}"
        for (work, graph), ranks in ranks_of.items()
    ]
    first, *_ = graphs
    differing = [rank for rank, seen in graphs.items() if seen != graphs[first]]
    whole = str(world) if len(graphs) == world else f"the stage of ranks {spans(list(graphs))}"
    return (
        f"rank{'s' * (len(differing) > 1)} {spans(differing)} of {whole} would run another graph than "
        f"rank {first}, and wait in its first collective for ever; stopped before that:{indented(lines)}\n"
        "Usual causes: a Python number that depends on the rank (make it a tensor on the device), a batch or shard "
        "of another shape, work that only some ranks do.\n"
        f"nxtrain graphs CONFIG --world {world} --rank {first} --rank {differing[0]} --hlo DIR saves the texts of both"
    )


def in_world(text: str, members: Sequence[int]) -> str:
    """Replace group ranks by global ranks in a message of torch, such as `Ranks 1, 2`."""

    def renumber(match: re.Match[str]) -> str:
        return match[1] + ", ".join(str(members[int(number)]) for number in match[2].split(", "))

    return re.sub(r"(\b[Rr]anks? )(\d+(?:, \d+)*)", renumber, text)
