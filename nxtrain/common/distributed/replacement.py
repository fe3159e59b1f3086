"""Replacement of lost ranks: survivors keep their processes, and meet the replacements in the next start.

The agent's store outlives every rank. Survivors of start n report there, and leave their process groups. Once all
living ranks have reported, the agent starts the lost ranks again, and announces start n + 1. All ranks then meet as
after any restart. A start's number is the agent's count of restarts.

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
"""Variable with the number of the start, which torch's agent sets."""

REPORT_S = 30.0
"""Seconds in which all living ranks report a loss; a rank notices the loss in its next collective."""

ANNOUNCE_S = 2 * REPORT_S
"""Seconds in which a survivor expects the announcement."""

LOOK_S = 0.02

WRITING_S = 10.0
"""Seconds for the write of a checkpoint to end, which has lost its peers."""

WRITER = "nxtrain-checkpoint"
"""Name of the thread that writes a checkpoint."""


class Replacement:
    """Agreement of the agent and the survivors of a start on the next start.

    Every method raises a RuntimeError once the store is gone.
    """

    def __init__(self, store: Store, start: int) -> None:
        self._store = PrefixStore(f"nxtrain/replacement/{start}", store)

    def report(self, rank: int) -> None:
        """Report that a rank has lost a peer, keeps its state, and waits for the next start."""
        self._store.set(f"survivor/{rank}", "")

    def have_reported(self, ranks: Collection[int]) -> bool:
        """True if all of some ranks have reported."""
        return bool(self._store.check([f"survivor/{rank}" for rank in ranks]))

    def refuse(self) -> None:
        """Refuse a replacement in this start: the state in the memory of the ranks cannot be trusted."""
        self._store.set("refused", "")

    def is_refused(self) -> bool:
        """True if a rank has refused a replacement."""
        return bool(self._store.check(["refused"]))

    def announce(self) -> None:
        """Announce the next start, for which the lost ranks are started again."""
        self._store.set("next", "")

    def is_announced(self) -> bool:
        """True once the next start is announced."""
        return bool(self._store.check(["next"]))


def open_replacement(rejoined: int) -> Replacement | None:
    """Agreement of this rank's start; None: no agent's store outlives the ranks of this start.

    Args:
        rejoined: Times that this process has met the other ranks again.

    Raises:
        DistError: The store is gone.
    """
    placement = Placement.read()
    if not (placement.is_only_agent and placement.uses_agents_store):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = connect(host, port, placement.rank, timedelta(seconds=REPORT_S))
    return Replacement(store, placement.restarts + rejoined)


def refuse(rejoined: int) -> None:
    """Refuse a replacement of lost ranks in this start, whose state in memory cannot be trusted."""
    with suppress(DistError):
        replacement = open_replacement(rejoined)
        if replacement is not None:
            replacement.refuse()


def end_waits() -> None:
    """Abort the process groups after the loss of a peer, so that no thread and no device waits in a group any longer.

    Tensors of the device can be read only then.
    """
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def rejoin(rejoined: int) -> bool:
    """Leave the aborted process groups, and wait for the next start.

    Args:
        rejoined: Times that this process has met the other ranks again.

    Returns:
        True if this process goes on as a rank of the next start; False if it must end.
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
    """The error, without the stacks of the error and of its causes."""
    causes: list[BaseException] = [error]
    while causes:
        cause = causes.pop()
        cause.__traceback__ = None
        causes += [other for other in (cause.__cause__, cause.__context__) if other is not None]
    return error
