"""Rendezvous of the ranks through a TCP store of `torch.distributed`, with an explanation of each failure."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from functools import partial

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from nxtrain.common.distributed.failures import first_line
from nxtrain.common.errors import BackendError
from nxtrain.common.process.background import BackgroundTask
from nxtrain.common.process.placement import Placement
from nxtrain.common.text import listed

LATE_S = 1.0
"""Seconds beyond the timeout to wait for a connection attempt, since torch's own attempt may never end."""


def join_rendezvous(rank: int, world: int, timeout: timedelta, rejoined: int = 0) -> Store:
    """Wait until all ranks have joined the rendezvous, and return the store of this start.

    The address of the store is in torchrun's variables MASTER_ADDR and MASTER_PORT.

    torchrun's agent keeps one store for all starts, which still has entries of earlier starts, such as addresses of
    dead ranks. On one machine, the agent's restart count separates the starts. On several machines the restart counts
    may differ, so `nxtrain.launch.torchrun` makes a new store for each start.

    Args:
        rejoined: Number of times that this process has rejoined the run. The agent counts each as a restart.

    Source: torch 2.9, torch/distributed/elastic/rendezvous/dynamic_rendezvous.py.
    """
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise _no_store(f"{error} is not a port" if isinstance(error, ValueError) else f"{error} is not set") from error
    store = _within(timeout, host, port, rank)
    try:
        store.set_timeout(timeout)
        placement = Placement.read()
        if placement.is_only_agent:
            store = store_of_start(store, placement.restarts + rejoined)
        refusal = _refusal(store, rank, world, timeout)
    except DistError as error:
        raise _no_store(first_line(error)) from error
    if refusal:
        raise BackendError(refusal)
    return store


def store_of_start(store: Store, start: int) -> Store:
    """Part of the agent's store for one start; `start` is the agent's restart count."""
    return PrefixStore(f"nxtrain/start/{start}", store)


def connect(host: str, port: int, rank: int, timeout: timedelta) -> Store:
    """Connect to the TCP store at an address. Without an agent of torchrun, rank 0 creates the store."""
    is_agents = Placement.read().uses_agents_store
    makes = rank == 0 and not is_agents
    # No count of ranks to wait for: `_refusal` waits instead, and names the missing ranks.
    return TCPStore(host, port, is_master=makes, timeout=timeout, wait_for_workers=False, multi_tenant=not is_agents)


def _within(timeout: timedelta, host: str, port: int, rank: int) -> Store:
    """Connect to the store in a thread, which is abandoned at the timeout."""
    attempt = BackgroundTask("nxtrain-meeting", partial(connect, host, port, rank, timeout))
    attempt.start()
    attempt.join(timeout.total_seconds() + LATE_S)
    why = f"no answer within {timeout.total_seconds():g} seconds"
    failed: Exception | None = None
    if attempt.done:
        try:
            return attempt.result()
        except (DistError, ValueError, TypeError) as error:
            why, failed = first_line(error), error
    if "EADDRINUSE" in why:
        raise _no_store(f"port {port} is in use on this machine, by another program or an earlier run")
    raise _no_store(f"{_probe(host, port)} ({why})") from failed


def _probe(host: str, port: int) -> str:
    """Describe an address at which no store answers: another program, no listener, or an unknown host name."""
    try:
        with socket.create_connection((host, port), timeout=LATE_S):
            return "something listens there that is not a store of torch, so another program uses the port"
    except socket.gaierror:
        return f"the name {host} does not resolve on this machine"
    except (OSError, OverflowError) as error:
        return f"nobody listens there: {error}"


def _refusal(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """Wait for all ranks; return the reason why the rendezvous fails, or an empty string if it succeeds."""
    there, _, other = store.compare_set("nxtrain/world", "", f"{world} rank {rank}").decode().partition(" ")
    if int(there) != world:
        text = (
            f"rank {rank} was started with WORLD_SIZE={world}, and {other} with {there}; all ranks need the same. "
            "Give every torchrun the same --nnodes and --nproc-per-node, or start all of them with nxtrain launch"
        )
        store.set("nxtrain/refusal", text)
        return text
    store.set(f"nxtrain/here/{rank}", "yes")
    if store.add("nxtrain/met", 1) == world:
        store.compare_set("nxtrain/refusal", "", "none")
    try:
        text = store.get("nxtrain/refusal").decode()
    except DistError:
        missing = [other for other in range(world) if not store.check([f"nxtrain/here/{other}"])]
        if not missing:
            raise
        shown = listed(missing) + Placement.read().on_nodes(missing)
        return (
            f"{len(missing)} of {world} ranks did not come within recovery.hang_timeout_s="
            f"{timeout.total_seconds():g} seconds: {shown}. See the logs of these ranks, and check that "
            "every machine of the run was started"
        )
    return "" if text == "none" else text


def _no_store(why: str) -> BackendError:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return BackendError(
        f"cannot meet the other ranks at MASTER_ADDR:MASTER_PORT={where}: {why}. "
        "MASTER_ADDR must be an address of the first machine that all others reach, and MASTER_PORT a free port; "
        "torchrun and nxtrain launch set both"
    )
