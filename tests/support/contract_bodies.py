"""Work of ranks and devices that is held to `tests.support.contract`; imported by name in their processes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.kernels import Kernels
from nxtrain.common.layers import LayerSet
from nxtrain.common.mesh import Mesh
from nxtrain.parallel.native import NativeLayers
from tests.support import contract_functions, contract_kernels, contract_layers
from tests.support.contract import FORMS, Placed, Setting, Watch, hold, place
from tests.support.contract_functions import Ranks
from tests.support.contract_kernels import exact_attention

DTYPES = (torch.float32, torch.bfloat16)


def ranks_of(backend: Backend) -> Ranks:
    """All ranks of the world, which share layers."""
    return Ranks(backend.collectives, Mesh.build(backend.world, backend.rank, tp=backend.world).tp)


def hold_functions(backend: Backend, names: Sequence[str], seed: int, draws: int) -> None:
    """Hold autograd functions; all ranks draw the same."""
    ranks = ranks_of(backend)
    for function, case in contract_functions.CASES.items():
        rng = Random(f"{seed} {function.__name__}")
        for _ in range(draws if function.__name__ in names else 0):
            dtype = rng.choice(DTYPES)
            hold(case(ranks, rng), Setting(rng, dtype, backend.device))


def hold_layers(backend: Backend, seed: int, draws: int) -> None:
    """Hold the layers of the set that the backend opened; all ranks draw the same."""
    mesh = Mesh.build(backend.world, backend.rank, tp=backend.world)
    ranks = ranks_of(backend)

    def make(ranks: Ranks, dtype: torch.dtype, sequence_parallel: bool) -> LayerSet:
        native = NativeLayers(ranks.parallel(dtype, sequence_parallel, backend.kernels), loss_chunk_bytes=64)
        return backend.binding.layers(native, mesh, dtype)

    for name, cases in contract_layers.CASES.items():
        rng = Random(f"{seed} {name}")
        for _ in range(draws):
            dtype, case = rng.choice(DTYPES), rng.choice(cases)
            hold(case(make, ranks, rng, dtype, backend.put), Setting(rng, dtype, backend.device))


def hold_collectives(backend: Backend, seed: int) -> None:
    """Hold every collective but the one that may work in place to keep its input, which is contiguous."""
    comm, axis = backend.collectives, ranks_of(backend).axis
    rng = Random(f"{seed} collectives")
    peer = 1 - axis.rank
    for form in (form for form in FORMS if form.name in {"whole", "rows", "viewed"}):
        for dtype in DTYPES:
            size = (2 * axis.size, 3)
            generator = torch.Generator().manual_seed(rng.getrandbits(30) + axis.rank)
            made = place(form, size, lambda s: torch.randn(s, generator=generator).to(dtype), device=backend.device)  # noqa: B023
            watch = Watch()
            watch.add(f"{form.name} {dtype}", made)
            comm.all_gather(made.x, axis)
            watch.check("all_gather")
            comm.start_reduce_scatter(made.x, axis, scale=0.5).wait()
            watch.check("reduce_scatter")
            (total,) = comm.start_all_reduce_bucket([made.x], axis, torch.float32, scale=0.5).wait()
            if axis.size > 1:
                total.zero_()  # it is the caller's
            watch.check("start_all_reduce_bucket")
            if axis.size == 2:
                comm.exchange(made.x, axis, peer)
                watch.check("exchange")
                _send_and_receive(backend, made, watch, peer)


def _send_and_receive(backend: Backend, made: Placed, watch: Watch, peer: int) -> None:
    comm, axis = backend.collectives, ranks_of(backend).axis
    if axis.rank == 0:
        comm.start_send(made.x, axis, peer).wait()
        comm.start_receive(made.x, axis, peer).wait()
    else:
        comm.start_receive(made.x, axis, peer).wait()
        comm.start_send(made.x, axis, peer).wait()
    watch.check("a transfer")


def flash(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """The formula in place of NKI's kernel: three of (B, N, H, S) to (B, N, S, H)."""
    return exact_attention(*(x.permute(3, 0, 1, 2) for x in (q, k, v))).permute(1, 2, 0, 3)


def hold_xla_kernels(backend: Backend, seed: int, draws: int) -> None:
    """Hold the kernels of XLA's devices, Trainium's among them."""
    from nxtrain.backends.neuron.backend import NeuronKernels
    from nxtrain.backends.xla.backend import XlaKernels

    every: list[Kernels] = [XlaKernels(), NeuronKernels(rounds=False, flash=flash)]
    for kernels in every:
        for name, case in contract_kernels.CASES.items():
            own = name in vars(type(kernels)) or isinstance(kernels, NeuronKernels) is False
            rng = Random(f"{seed} {name}")
            for _ in range(draws if own else 0):
                hold(case(kernels, rng), Setting(rng, rng.choice(DTYPES), backend.device))
