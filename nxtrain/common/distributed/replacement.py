"""Replacement of lost ranks: surviving ranks keep their processes, and join the replacements in the next start.

The agent's store outlives every rank. Survivors of start n report to the store, and leave their process groups. Once
all living ranks have reported, the agent launches the lost ranks again, and announces start n + 1. All ranks then
rendezvous as after any restart. The number of a start is the agent's restart count.

Source: torch 2.9, `_abort_process_group` in torch/distributed/distributed_c10d.py, which ends all waits of a process.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from nxtrain.common.distributed.rendezvous import connect
from nxtrain.common.process.placement import Placement

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable with the number of the start, set by torchrun's agent."""

REPORT_S = 30.0
"""Seconds within which all living ranks report a lost rank. A rank notices the loss in its next collective."""

ANNOUNCE_S = 2 * REPORT_S
"""Seconds for which a survivor waits for the agent to announce the next start."""

LOOK_S = 0.02

WRITING_S = 10.0
"""Seconds to wait for the end of a checkpoint write that has lost its peers."""

WRITER = "nxtrain-checkpoint"
"""Name of the thread that writes checkpoints."""


class Replacement:
    """Messages between the agent and the surviving ranks of a start, in the store, about the next start.

    Every method raises a RuntimeError once the store is gone.
    """

    def __init__(self, store: Store, start: int) -> None:
        self._store = PrefixStore(f"nxtrain/replacement/{start}", store)

    def report(self, rank: int) -> None:
        """Report that `rank` has lost a peer, keeps its state in memory, and waits for the next start."""
        self._store.set(f"survivor/{rank}", "")

    def have_reported(self, ranks: Collection[int]) -> bool:
        """True if all the given ranks have called `report`."""
        return bool(self._store.check([f"survivor/{rank}" for rank in ranks]))

    def refuse(self) -> None:
        """Refuse to replace lost ranks in this start, since the state in the memory of the ranks cannot be trusted."""
        self._store.set("refused", "")

    def is_refused(self) -> bool:
        """True if any rank has called `refuse`."""
        return bool(self._store.check(["refused"]))

    def announce(self) -> None:
        """Announce the next start, in which the agent launches the lost ranks again."""
        self._store.set("next", "")

    def is_announced(self) -> bool:
        """True once the agent has announced the next start."""
        return bool(self._store.check(["next"]))


def open_replacement(rejoined: int) -> Replacement | None:
    """Connect to the `Replacement` of this rank's start; None if no store of an agent outlives the ranks.

    Args:
        rejoined: Number of times that this process has rejoined the run.

    Raises:
        DistError: The store is unreachable.
    """
    placement = Placement.read()
    if not (placement.is_only_agent and placement.uses_agents_store):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = connect(host, port, placement.rank, timedelta(seconds=REPORT_S))
    return Replacement(store, placement.restarts + rejoined)


def refuse(rejoined: int) -> None:
    """Refuse to replace lost ranks in this start, since the state in memory cannot be trusted.

    Args:
        rejoined: Number of times that this process has rejoined the run.
    """
    with suppress(DistError):
        replacement = open_replacement(rejoined)
        if replacement is not None:
            replacement.refuse()


def end_waits() -> None:
    """Abort all process groups after the loss of a peer, so that neither threads nor devices wait in a collective.

    Device tensors can be read only after this call.
    """
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def rejoin(rejoined: int) -> bool:
    """Leave the aborted process groups, and wait for the agent to announce the next start.

    Args:
        rejoined: Number of times that this process has rejoined the run.

    Returns:
        True if this process continues as a rank of the next start; False if the process must end.
    """
    gc.collect()  # a process group of gloo leaves its peers once nothing refers to the group
    for thread in threading.enumerate():
        if thread.name == WRITER:  # its files would meet those of the next start
            thread.join(WRITING_S)
            if thread.is_alive():
                return False
    limit = time.monotonic() + ANNOUNCE_S
    try:
        replacement = open_replacement(rejoined)
        if replacement is None:
            return False
        replacement.report(Placement.read().rank)
        while not replacement.is_announced():
            if time.monotonic() > limit:
                return False
            time.sleep(LOOK_S)
    except DistError:
        return False
    return True


def without_stacks(error: Exception) -> Exception:
    """Remove the tracebacks of an error and of all its causes in place, and return the error."""
    causes: list[BaseException] = [error]
    while causes:
        cause = causes.pop()
        cause.__traceback__ = None
        causes += [other for other in (cause.__cause__, cause.__context__) if other is not None]
    return error
