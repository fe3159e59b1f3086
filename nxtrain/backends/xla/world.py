"""Rendezvous that joins the processes of torchrun into one PyTorch/XLA world."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from nxtrain.common.distributed.host_group import HostGroup
from nxtrain.common.errors import BackendError, HangError
from nxtrain.common.process.deadlines import first_use_limit_s
from nxtrain.common.process.placement import Placement

_PLACE, _NAME = "nxtrain/store", "nxtrain/name"
_ANSWER = timedelta(seconds=5)
"""Time limit for an answer of a store; connections to a dead process are refused at once."""


def join(placement: Placement, hang_timeout_s: float) -> HostGroup:
    """Join the other ranks; afterwards torch's default process group has the backend `xla`.

    torchrun alone is not enough: until devices replicate, `world_size()` is 1 and torch-xla silently skips every
    collective. The init method `xla://` enables replication. It must run before the first read of the world size, which
    torch-xla caches. Host objects cannot be gathered over `xla`, so the hosts have a separate group, for checkpoint
    plans and for barriers without a graph.

    Args:
        placement: Ranks of this process, set by torchrun.
        hang_timeout_s: Seconds that a rank waits for the others to join. Later waits on the host are longer, and
            collectives inside a graph have the runtime's own limit.

    Returns:
        Group of the hosts.

    Raises:
        BackendError: PyTorch/XLA's world differs from torchrun's.

    Source: torch_xla 2.9, torch_xla/_internal/{rendezvous,pjrt,neuron}.py and runtime.py; the pull requests
    https://github.com/pytorch/xla/pull/5438 and https://github.com/huggingface/transformers/pull/27800, by the authors
    for TPU and for Neuron; archive/nxd-training/pytorch-neuron-programming-guide.rst in
    https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a.
    """
    import torch_xla.distributed.xla_backend  # noqa: F401  (registers the backend xla and the method xla://)
    import torch_xla.runtime as xr
    from torch_xla._internal import rendezvous

    if placement.world > placement.local_world and placement.uses_agents_store:
        rendezvous._store = open_store(os.environ, placement.rank, hang_timeout_s)
    dist.init_process_group("xla", init_method="xla://", timeout=timedelta(seconds=hang_timeout_s))
    rank, world = xr.global_ordinal(), xr.world_size()
    if (rank, world) != (placement.rank, placement.world):
        dist.destroy_process_group()
        raise BackendError(misfit(placement, rank, world, str(xr.device_type())))
    # A rank that compiles is late; once all graphs are compiled, the watchdog's limit is shorter.
    return HostGroup(first_use_limit_s(hang_timeout_s))


def open_store(environ: Mapping[str, str], rank: int, timeout_s: float) -> dist.Store:
    """Return a key-value store for the rendezvous of the current start's ranks, on any number of machines.

    All starts of a run share the agents' store, and torch-xla separates them by the number of restarts. But an agent
    counts only the restarts that its own ranks caused. After the first failure, the machines would wait for each other
    under different keys. So rank 0 opens a store for this start, and publishes its address in the agents' store. The
    store of an earlier start does not answer, since an agent ends its ranks before it joins the next start.

    Args:
        environ: Environment variables of this rank, with the address of the agents' store.
        rank: Rank of this process.
        timeout_s: Seconds that a rank waits for rank 0.

    Raises:
        HangError: Rank 0 did not publish its store in time.

    Source: torch_xla 2.9, torch_xla/_internal/rendezvous.py; torch 2.9, torch/distributed/elastic/agent/server/api.py.
    """
    host, end_s = environ["MASTER_ADDR"], time.monotonic() + timeout_s
    timeout = timedelta(seconds=timeout_s)
    agents = dist.TCPStore(host, int(environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        name = uuid.uuid4().hex
        store.set(_NAME, name)
        agents.set(_PLACE, f"{store.port} {name}")
        return store
    while time.monotonic() < end_s:
        with suppress(dist.DistError):  # the store of an earlier start is gone, or rank 0 has not published yet
            port, name = agents.get(_PLACE).decode().split()
            store = dist.TCPStore(host, int(port), is_master=False, timeout=_ANSWER)
            if store.get(_NAME).decode() == name:
                store.set_timeout(timeout)
                return store
        time.sleep(0.2)
    raise HangError(f"rank 0 did not open a store on {host} within recovery.hang_timeout_s={timeout_s:g} seconds")


def misfit(placement: Placement, rank: int, world: int, device: str) -> str:
    """Error message for a PyTorch/XLA world that differs from torchrun's, with a remedy.

    Args:
        placement: Ranks of this process, set by torchrun.
        rank, world: Rank and world size according to PyTorch/XLA.
        device: PJRT's name of the device type.
    """
    setting = (
        f"torchrun started rank {placement.rank} of {placement.world}, but PyTorch/XLA on {device} is rank {rank} "
        f"of {world}"
    )
    if device == "CPU":
        return f"{setting}: its CPU device cannot join other processes. Use backend.name=cpu for several ranks"
    if not dist.is_torchelastic_launched():
        return f"{setting}: RANK and WORLD_SIZE are set, but not by torchrun. Use torchrun or nxtrain launch"
    if placement.local_world == 1:
        return f"{setting}: with one rank per node it assumes a world of one rank. Start at least two ranks per node"
    return (
        f"{setting}. Environment variables of the shell describe another world: unset XLA_USE_SPMD, "
        "NEURONCORE_NUM_DEVICES and all variables that begin with NEURON_PJRT_ or PJRT_LOCAL_, and start the ranks "
        "with one torchrun per node or nxtrain launch"
    )
