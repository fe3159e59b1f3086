"""Trainium's rounding on CPU: every cast from float32 to bfloat16 draws from a generator of the rank's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nxtrain.backends.base import Backend
from nxtrain.backends.kernels import PlainKernels
from nxtrain.backends.neuron.backend import NeuronKernels
from nxtrain.config.check import Resolved
from nxtrain.optim import adamw
from nxtrain.optim.rounding import rounding_keys
from nxtrain.parallel import grads
from nxtrain.sharding import Layout
from nxtrain.train.health.replica_check import Vote
from nxtrain.train.step import TrainState, train_step
from tests.support.parity import LR, batches, local_batch, start

Entries = dict[tuple[str, str, tuple[int, ...]], Tensor]
"""Bits by kind, global name and offsets."""


class RandomCasts(TorchDispatchMode):
    """Effect of `NEURON_RT_STOCHASTIC_ROUNDING_EN=1` on casts.

    Args:
        seed: `NEURON_RT_STOCHASTIC_ROUNDING_SEED`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Round the input of a cast at random, so that the cast itself is exact."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and _narrows(args[1].dtype, args[0].dtype):
            return func(args[0], self.rounded(args[1]), *args[2:], **kwargs)
        if func is torch.ops.aten._to_copy.default and _narrows(args[0].dtype, kwargs.get("dtype")):
            return func(self.rounded(args[0]), **kwargs)
        return func(*args, **kwargs)

    def rounded(self, x: Tensor) -> Tensor:
        """float32 that bfloat16 has, up or down with the nearer the likelier; as many draws as entries."""
        noise = torch.randint(0, 1 << 16, x.shape, generator=self.generator, dtype=torch.int32)
        bits = (x.contiguous().view(torch.int32) + noise) & torch.tensor(-0x10000, dtype=torch.int32)
        return torch.where(x.isfinite(), bits.view(torch.float32), x)


def _narrows(source: torch.dtype, to: torch.dtype | None) -> bool:
    return source == torch.float32 and to == torch.bfloat16


class CpuNeuronKernels(NeuronKernels):
    """Trainium's kernels with the hardware's rounding on, on CPU."""

    def __init__(self) -> None:
        self._bitcasts = {dtype: _view_as(dtype) for dtype in (torch.int32, torch.float32)}
        self.rounds, self.flash, self.lnc = True, None, 1

    def recompute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return PlainKernels.recompute(self, function, *inputs)


def _view_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def view(x: Tensor) -> Tensor:
        return x.view(dtype)

    return view


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """The product with one rule broken: `unshared` rounds all in hardware, `ranked` has a key for each rank.

    `apart` lets each tensor parallel rank keep its own gradient of a norm weight.
    """
    kept = Layout.is_shared, grads._TensorParallelMeans.__call__

    def ranked(layout: Layout, shards: Any, kind: str, seed: int, put: Any) -> Any:
        return rounding_keys(layout, shards, kind, seed + layout.mesh.rank, put)

    if name == "unshared":
        Layout.is_shared = lambda *_: False  # type: ignore[method-assign]
    elif name == "ranked":
        adamw.rounding_keys = ranked  # type: ignore[attr-defined]
    elif name == "apart":
        grads._TensorParallelMeans.__call__ = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Layout.is_shared, grads._TensorParallelMeans.__call__ = kept  # type: ignore[method-assign]
        adamw.rounding_keys = rounding_keys  # type: ignore[attr-defined]


def trained(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], steps: int, seeds: Sequence[int], broken: str
) -> tuple[Entries, list[str]]:
    """Tensors of this rank after some steps on such hardware, and the vote's finding on its copies.

    Args:
        backend: Of this rank; its kernels are replaced.
        resolved: The run.
        weights: Whole, at the start.
        steps: How many.
        seeds: Of the hardware, by rank.
        broken: See `mutant`; empty for the product as it is.
    """
    backend.kernels = CpuNeuronKernels()
    with mutant(broken):
        state = start(backend, resolved, weights)
        with RandomCasts(seeds[backend.rank]):
            for batch in batches(resolved, steps):
                train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), LR)
    vote = Vote(state)
    of_all, _ = vote.gather()
    return entries(state), [str(found) for found in vote.dissents(of_all)]


def entries(state: TrainState) -> Entries:
    """The bits of parameters and optimizer state, by where they belong in the model."""
    whole = Layout(state.table, replace(state.mesh, shard_size=1))
    params = {name: p.detach() for name, p in state.model.named_parameters()}
    kinds = [("model", params, whole), *((kind, found, state.layout) for kind, found in state.optimizer.state.items())]
    bits = {2: torch.int16, 4: torch.int32}
    return {
        (kind, layout.table[name].global_name(name, block.segment), block.offsets): block.of(tensors[name])
        .contiguous()
        .view(bits[tensors[name].dtype.itemsize])
        for kind, tensors, layout in kinds
        for name, blocks in layout.items()
        for block in blocks
    }
