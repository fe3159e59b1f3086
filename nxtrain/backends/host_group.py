"""What ranks tell each other on their hosts, beside a process group that carries device tensors only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby

import torch.distributed as dist

from nxtrain.errors import BackendError, HangError

SHOWN_DIGITS = 12
"""Of a graph's hash, as `nxtrain graphs` shows them."""

SHOWN_GRAPHS = 4
"""Graphs of a disagreement that its message lists."""


class HostGroup:
    """All ranks of a run, talking over gloo. Every rank makes one, and calls its methods in the same order.

    Args:
        hang_timeout_s: Seconds that a rank waits for the others.

    Attributes:
        group: Carries host tensors and objects.
    """

    def __init__(self, hang_timeout_s: float) -> None:
        self._timeout = timedelta(seconds=hang_timeout_s)
        group = dist.new_group(backend="gloo", timeout=self._timeout)
        assert group is not None, "every rank is a member"
        self.group: dist.ProcessGroup = group

    def barrier(self, work: str = "a barrier") -> None:
        """Wait until every rank is here.

        Raises:
            HangError: Some rank did not come in time.
        """
        try:
            dist.monitored_barrier(self.group, self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise HangError(
                f"some ranks are missing at {work}, where the others wait for "
                f"recovery.hang_timeout_s={self._timeout.total_seconds():g} seconds: {reason}. A missing rank died, "
                "or does other work than the rest; its own last lines say more"
            ) from error

    def compare(self, work: str, graph: str) -> None:
        """Make sure that all ranks are about to run the same graph.

        Args:
            work: What this rank is doing, in words.
            graph: Its hash.

        Raises:
            BackendError: They are not; rank 0 says how they differ.
            HangError: Some rank did not come in time.
        """
        self.barrier(f"the comparison of graphs in {work}")
        rank, world = dist.get_rank(self.group), dist.get_world_size(self.group)
        found: list[tuple[str, str]] = [("", "")] * world
        dist.all_gather_object(found, (work, graph), group=self.group)
        if problem := disagreement(found):
            raise BackendError(
                problem if rank == 0 else f"ranks are about to run different graphs in {work}; see rank 0"
            )


def disagreement(found: Sequence[tuple[str, str]]) -> str:
    """Say how ranks differ; empty if they agree.

    Args:
        found: Work and hash of each rank.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, seen in enumerate(found):
        ranks_of.setdefault(seen, []).append(rank)
    if len(ranks_of) == 1:
        return ""
    other = next(rank for rank, seen in enumerate(found) if seen != found[0])
    lines = [
        f"    rank{'s' * (len(ranks) > 1)} {spans(ranks)}: {work}, {graph[:SHOWN_DIGITS] or 'no graph'}"
        for (work, graph), ranks in ranks_of.items()
    ]
    if len(lines) > SHOWN_GRAPHS:
        lines = [*lines[:SHOWN_GRAPHS], f"    and {len(lines) - SHOWN_GRAPHS} more"]
    differing = [rank for rank, seen in enumerate(found) if seen != found[0]]
    return "\n".join(
        [
            f"rank{'s' * (len(differing) > 1)} {spans(differing)} of {len(found)} would run another graph than rank 0, "
            "and wait in its first collective for ever; stopped before that:",
            *lines,
            "Usual causes: a Python number that depends on the rank (make it a tensor on the device), a batch or shard "
            "of another shape, work that only some ranks do.",
            f"nxtrain graphs CONFIG --world {len(found)} --rank 0 --rank {other} --hlo DIR saves the texts of both",
        ]
    )


def spans(ranks: Sequence[int]) -> str:
    """Ascending numbers as people write them: 0-2, 5."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda at: at[1] - at[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
