"""NeuronX Distributed on XLA devices that are threads of one process, or that are not there at all.

Its groups belong to the process. Its layers and sums, as ours use them, go over lists of ranks, and nothing depends on
which rank made those: rank 0 makes them for all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.base import Backend, Binding
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.tracing import pretended_nxd
from nxtrain.backends.xla import XlaBackend
from nxtrain.backends.xla_graphs import hash_of, pending
from nxtrain.config.check import Resolved
from nxtrain.graphs.trace import trace
from nxtrain.train.build import build_meta, mesh_of
from nxtrain.train.step import train_step
from tests.support import nxd_cpu
from tests.support.models import tokens, weights_of
from tests.support.parity import LR, Course, local_batch, run_ours, start

_LOCK = threading.Lock()


def bind(backend: Backend) -> Binding:
    """Bind NxD in a process group that has no peers; the sum by which it first meets all ranks is left out."""
    import torch_xla.distributed.xla_backend  # noqa: F401

    nxd_cpu.prepare(cpu_mode=False)
    os.environ[nxd_cpu.PLATFORM] = "trn1"
    if not dist.is_initialized():
        dist.init_process_group("xla", store=dist.HashStore(), rank=backend.rank, world_size=backend.world)
    from neuronx_distributed.parallel_layers.parallel_state import initialize_model_parallel

    from nxtrain.backends.neuron.nxd import groups
    from nxtrain.backends.neuron.nxd.binding import NxdBinding

    vars(groups)["initialize_model_parallel"] = partial(initialize_model_parallel, skip_collective_init=True)
    binding = NxdBinding(backend.device)
    binding._owns_process_group = True
    return binding


def number_ranks() -> None:
    """Give the embedding its rank as NxD itself does, as a number."""
    from nxtrain.backends.neuron.nxd import layers

    vars(layers)["_RankOnDevice"] = lambda rank: None


def courses(backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor]]], steps: int) -> list[Course]:
    """Train each case from its weights on a device of several; all cases have the same degrees."""
    with _LOCK:
        backend.binding = bind(backend)
        # Whoever comes first makes the groups; the others find them.
        resolved, _ = cases[0]
        build_meta(resolved, backend, mesh_of(resolved, backend))
    return [run_ours(backend, resolved, steps, weights) for resolved, weights in cases]


def received(backend: Backend, pair: Sequence[int]) -> tuple[list[float], list[float]]:
    """What a pair of devices gathers, and what NxD takes of it on rank 0 for what rank 1, its previous, has sent.

    Args:
        backend: Of rank 0, which offers zeros, or of rank 1, which offers ones.
        pair: Both ranks, in the order in which NxD names them.
    """
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    groups = [list(pair)]
    offered = torch.tensor([float(backend.rank)]).to(backend.device)
    gathered = xm.all_gather(offered, groups=groups, pin_layout=False)
    backend.step_boundary()
    everything = gathered.cpu()
    with _LOCK:
        nxd_cpu.prepare(cpu_mode=False)
        from neuronx_distributed.parallel_layers import parallel_state
        from neuronx_distributed.pipeline import comm
        from neuronx_distributed.utils.serialization import TensorMeta

        meta = TensorMeta(0, torch.float32, torch.Size([1]), False, torch.device("cpu"))
        with (
            patch.object(parallel_state, "get_prev_rank_replica_groups", lambda: groups),
            patch.object(comm, "get_device", lambda: torch.device("cpu")),
            patch.object(comm, "rmsg", str),
            patch.object(xr, "global_ordinal", lambda: 0),
            patch.object(xm, "all_gather", lambda *_, **__: everything),
        ):
            return everything.tolist(), comm.recv_from(meta).tolist()


def traced(backend: Backend, plans: Sequence[Resolved], world: int, ranks: Sequence[int], instance: str) -> list[Any]:
    """The report of `nxtrain graphs` on each plan, with NxD's layers on ranks of a pretended world.

    Args:
        backend: Of the one true device.
        plans: To trace, one after the other.
        world: Ranks of the pretended world.
        ranks: Those to play.
        instance: Pretended machine, by name.
    """
    nxd_cpu.prepare(cpu_mode=False)
    bind_pretended = pretended_nxd(INSTANCES[instance])
    return [trace(plan, world, ranks, 2, None, bind_pretended) for plan in plans]


def hashes_of_runs(backend: Backend, plans: Sequence[Resolved], steps: int) -> list[list[str]]:
    """The graphs that a device of several runs while it trains each plan with NxD's layers, in order."""
    import torch_xla.core.xla_model as xm

    assert isinstance(backend, XlaBackend)
    sync, found = backend._sync, list[list[str]]()

    def note() -> None:
        # To hash a graph waits for the last one, which waits for other devices, with the interpreter's lock held.
        xm.wait_device_ops(xm.xla_real_devices([backend.device]))
        if computed := pending(backend.device):
            found[-1].append(hash_of(computed))
        sync()

    with _LOCK:
        backend.binding = bind(backend)
        build_meta(plans[0], backend, mesh_of(plans[0], backend))
    for plan in plans:
        state = start(backend, plan, weights_of(plan))
        batch = local_batch(state, tokens(plan, plan.config.train.global_batch), plan.config.train.micro_batch)
        backend.step_boundary()
        found.append([])
        backend._sync = note
        for _ in range(steps):
            result = train_step(state, batch, LR)
            backend.step_boundary()
            del result
        backend._sync = sync
    return found
