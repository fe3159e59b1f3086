"""How the ranks of `torch.distributed` find each other, and what people are told when they do not."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nxtrain.errors import BackendError


def meet(rank: int, world: int, timeout: timedelta) -> Store:
    """The store in which the ranks of this start meet, as torchrun's variables name it.

    An agent of torch keeps one store for all starts, with what earlier ones left in it: addresses of ranks that are
    gone, and words to those. On one machine its count of restarts tells them apart; on several it may differ between
    machines, and there `nxtrain.launch.torchrun` makes a store for each start.

    Args:
        rank, world: This rank, and how many there are.
        timeout: Time that a rank waits for the others.

    Raises:
        BackendError: It cannot be reached, or ranks differ in how many they are.

    Source: torch 2.9, torch/distributed/elastic/rendezvous/dynamic_rendezvous.py.
    """
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store: Store = next(rendezvous("env://", rank, world, timeout=timeout))[0]
        store.set_timeout(timeout)
        if os.environ.get("GROUP_WORLD_SIZE") == "1" and "TORCHELASTIC_RESTART_COUNT" in os.environ:
            store = PrefixStore(f"nxtrain/start/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        first = store.compare_set("nxtrain/world", "", f"{world} rank {rank}").decode()
    except (DistError, ValueError) as error:
        raise BackendError(
            f"cannot meet the other ranks at MASTER_ADDR:MASTER_PORT={where}: {str(error).strip().splitlines()[0]}. "
            "It must name the first machine as all others know it, and a port that they reach and nothing else uses; "
            "torchrun and nxtrain launch set both"
        ) from error
    there, _, other = first.partition(" ")
    if int(there) != world:
        raise BackendError(
            f"rank {rank} was started with WORLD_SIZE={world}, and {other} with {there}; all ranks need the same. "
            "Give every torchrun the same --nnodes and --nproc-per-node, or start all of them with nxtrain launch"
        )
    return store
