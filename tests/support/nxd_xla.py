"""NeuronX Distributed on XLA devices that are threads of one process, or that are not there at all.

Its groups belong to the process. Its layers and sums, as ours use them, go over lists of ranks, and nothing depends on
which rank made those: rank 0 makes them for all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.base import Backend, Binding
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.nxd.simulated import SimulatedNxd
from nxtrain.backends.xla.backend import XlaBackend
from nxtrain.backends.xla.graphs import freeze_older_objects, hash_of, pending
from nxtrain.backends.xla.tracing import simulated_nxd
from nxtrain.config.check import Resolved
from nxtrain.tools.trace.trace import trace
from nxtrain.train.build import build_meta, mesh_of
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import train_step
from tests.support import nxd_cpu
from tests.support.models import tokens, weights_of
from tests.support.parity import LR, Course, run_ours, start

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

    def without_first_collective(**settings: Any) -> Any:
        # The thread that comes first makes the groups; in NxD's initial all-reduce it would wait for the others.
        return initialize_model_parallel(**{**settings, "skip_collective_init": True})

    vars(groups)["initialize_model_parallel"] = without_first_collective
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
    """Values that a pair of devices gathers, and NxD's choice on rank 0 for the values sent by rank 1, its previous."""
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
    """The report of `nxtrain graphs` on each plan, with NxD's layers on ranks of a pretended world."""
    nxd_cpu.prepare(cpu_mode=False)
    bind_pretended = simulated_nxd(INSTANCES[instance])
    return [trace(plan, world, ranks, 2, None, bind_pretended) for plan in plans]


def hashes_of_steps(
    backend: Backend, plans: Sequence[Resolved], world: int, ranks: Sequence[int], steps: int
) -> list[list[list[str]]]:
    """The graphs of steps by plan and rank, from the backend and the binding of a run, executing nothing."""
    import torch_xla
    import torch_xla.runtime as xr

    freeze_older_objects()
    results: list[list[list[str]]] = []

    def note() -> None:
        if recorded := pending(backend.device):
            results[-1][-1].append(hash_of(recorded))
        torch_xla._XLAC._clear_pending_irs(str(backend.device))
        torch_xla._XLAC._set_all_reduce_token(str(backend.device), None)

    for plan in plans:
        results.append([])
        for rank in ranks:
            results[-1].append([])
            xr._WORLD_SIZE, xr._ORDINAL = world, rank
            pretended = XlaBackend(sync=note)
            pretended.binding = bind(pretended)
            state = start(pretended, plan, weights_of(plan))
            rows = tokens(plan, plan.config.train.global_batch // state.mesh.dp.size)
            rows = rows.unflatten(0, (-1, plan.config.train.micro_batch))
            batch = DeviceBatch.of(rows[..., :-1], rows[..., 1:], pretended.put)
            torch_xla.sync()
            for _ in range(steps):
                result = train_step(state, batch, LR)
                pretended.step_boundary()
                del result
            pretended.binding.close()
    return results


def orders(backend: Backend, cases: Sequence[tuple[str, int, int]]) -> list[tuple[int, ...]]:
    """NxD's order of ranks on pretended machines: instance, world and tp of each."""
    nxd_cpu.prepare(cpu_mode=False)
    results = []
    for instance, world, tp in cases:
        binding = SimulatedNxd(backend.device, world, 0, INSTANCES[instance])
        results.append(binding.rank_order(tp=tp, pp=1))
        dist.destroy_process_group()
    return results
