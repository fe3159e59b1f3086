"""Data parallelism: averaging gradients over ranks, and dividing the optimizer's update between them.

Every rank computes gradients of its own sequences, or of its own positions under context parallelism. So all ranks of
dp x cp are called data parallel in this module. With `Replicated`, every rank averages and updates all parameters. With
ZeRO-1, each rank averages and updates some rows of every parameter, and an all-gather collects the updated rows. The
module `fully_sharded` adds torch's own sharding.

Under expert parallelism, ranks hold different experts. An expert's gradient is summed over the ranks that hold the
expert. The sum is divided by the number of all data parallel ranks, as for every gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.backends.base import Binding
from nxtrain.common.distributed.collectives import Collectives, Done, Pending, PendingParts
from nxtrain.common.sharding import Layout
from nxtrain.parallel.precision import Precision


class DataParallel(ABC):
    """Interface of a data parallel strategy: averages gradients and publishes updated parameters.

    Attributes:
        layout: The entries of the model that this rank updates.
        shards: This rank's tensors of these entries, by parameter name.
        has_whole_parameters: Each rank holds whole parameters between steps.
    """

    layout: Layout
    shards: Mapping[str, Tensor]
    has_whole_parameters = True

    @abstractmethod
    def begin(self, *, last: bool) -> None:
        """Prepare the gradient reduction for a backward pass.

        Args:
            last: True for the step's last backward pass through the same parameters.
        """

    @abstractmethod
    def reduce(self) -> dict[str, Tensor]:
        """Gradients of `shards`, averaged over the data parallel ranks, by name; the caller may overwrite them."""

    @abstractmethod
    def publish(self) -> None:
        """Make the new values of `shards` visible to the next forward pass."""


@dataclass(frozen=True)
class Reduction:
    """Settings of the gradient reduction.

    Args:
        precision: Number types of the gradient sums.
        accumulates: Some steps have several micro-batches.
        bucket_bytes: Largest size of a bucket, in the type of the reduction.
    """

    precision: Precision
    accumulates: bool
    bucket_bytes: int


class Bucketed(DataParallel):
    """Data parallel strategy that reduces gradients bucket by bucket, overlapped with the last backward pass.

    A bucket's collective starts as soon as the last backward pass has computed all gradients of the bucket. On a lazy
    device, an early start gains nothing, and all micro-batches should record the same graph. There every micro-batch
    adds to preallocated sums, and the reduction follows the last micro-batch.

    Attributes:
        on_local: Called with names and this rank's gradient sums before they are averaged; None for no call.

    Args:
        parameters: Parameters of the model by name.
        layout: The entries that this rank updates.
        comm: Collectives.
        how: Number types and sizes of the reduction.
        put: Copies a host tensor to the device.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        comm: Collectives,
        how: Reduction,
        put: Callable[[Tensor], Tensor],
    ) -> None:
        self.layout = layout
        self._parameters = parameters
        self._comm = comm
        self.shards: Mapping[str, Tensor] = parameters
        self._copies, self._precision = layout.mesh.dp_cp, how.precision
        self.sums: dict[str, Tensor] = {}
        self._keeps_sums = comm.lazy and how.accumulates
        if self._keeps_sums:
            self.sums = {
                name: put(torch.zeros(p.shape, dtype=how.precision.accumulate)) for name, p in parameters.items()
            }
        self._is_last = True
        sizes: dict[str, dict[str, int]] = {}
        for name, p in reversed(list(parameters.items())):
            of_axes = sizes.setdefault(layout.axes_of(name).copies.name, {})
            of_axes[name] = p.numel() * how.precision.reduce.itemsize
        self.buckets: list[list[str]] = []
        for of_axes in sizes.values():
            self.buckets += fill_buckets(of_axes, how.bucket_bytes)
        self._bucket_of: dict[str, int] = {}
        for index, names in enumerate(self.buckets):
            self._bucket_of |= dict.fromkeys(names, index)
        self._missing = Counter(self._bucket_of.values())
        self._started: dict[int, Pending[list[Tensor]]] = {}
        self.on_local: Callable[[Sequence[str], Sequence[Tensor]], None] | None = None
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    def begin(self, *, last: bool) -> None:
        self._is_last = last

    def reduce(self) -> dict[str, Tensor]:
        if self._copies.size == 1:
            return {name: self._take(name) for name in self._parameters}
        reduced: dict[str, Tensor] = {}
        for index, names in enumerate(self.buckets):
            if index not in self._started:
                self._started[index] = self._start_bucket(index)
            pending = self._started.pop(index)
            reduced.update(zip(names, pending.wait(), strict=True))
        self._missing = Counter(self._bucket_of.values())
        return {name: reduced[name] for name in self._parameters}

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def finished(parameter: Tensor) -> None:
            if name in self.sums:
                self.sums[name].add_(take_grad(parameter))
            elif not self._is_last and parameter.dtype != self._precision.accumulate:
                # Autograd adds into `.grad` in the type of the parameter; a wider sum is kept in `sums`.
                self.sums[name] = take_grad(parameter).to(self._precision.accumulate)
            if self._is_last and self._copies.size > 1 and not self._comm.lazy:
                bucket = self._bucket_of[name]
                self._missing[bucket] -= 1
                if not self._missing[bucket]:
                    self._started[bucket] = self._start_bucket(bucket)

        return finished

    @torch.no_grad()
    def _start_bucket(self, index: int) -> Pending[list[Tensor]]:
        names = self.buckets[index]
        grads = [self._take(name) for name in names]
        if self.on_local is not None:
            self.on_local(names, grads)
        return self._start(grads, names)

    def _take(self, name: str) -> Tensor:
        if self._keeps_sums:
            total = self.sums[name].clone()
            self.sums[name].zero_()
            return total
        if name in self.sums:
            return self.sums.pop(name)
        return take_grad(self._parameters[name])

    @abstractmethod
    def _start(self, grads: list[Tensor], names: Sequence[str]) -> Pending[list[Tensor]]:
        """Start averaging the gradients of a bucket; all parameters of a bucket have the same axes."""


class Replicated(Bucketed):
    """Data parallelism in which every rank has all averaged gradients and updates all parameters.

    Args:
        parameters, layout, comm, how, put: As in `Bucketed`.
        binding: Library that averages gradients; None for nxtrain's own code.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        comm: Collectives,
        how: Reduction,
        put: Callable[[Tensor], Tensor],
        binding: Binding | None = None,
    ) -> None:
        super().__init__(parameters, layout, comm, how, put)
        self._binding = binding or Binding()

    def publish(self) -> None:
        """Do nothing, because the update has changed the parameters themselves."""

    def _start(self, grads: list[Tensor], names: Sequence[str]) -> Pending[list[Tensor]]:
        copies = self.layout.axes_of(names[0]).copies
        dtype = self._precision.reduce
        scale = 1.0 / self._copies.size
        if copies.size == self._copies.size:
            return self._binding.start_average(grads, copies, dtype, self._comm)
        if copies.size == 1:
            return Done([grad.to(dtype) * scale for grad in grads])
        return self._comm.start_all_reduce_bucket(grads, copies, dtype, scale=scale)


class Zero1(Bucketed):
    """ZeRO-1: each rank updates its rows of every parameter, then an all-gather collects the updated rows.

    Source: Rajbhandari et al. 2020 (arXiv:1910.02054) section 5.1.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        comm: Collectives,
        how: Reduction,
        put: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(parameters, layout, comm, how, put)
        shards: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            shard = layout.axes_of(name).shard
            # Rows of zeros are appended, so that all ranks have the same number of rows.
            padded = pad_rows(parameter.detach().cpu(), shard.size)
            shards[name] = put(padded.chunk(shard.size)[shard.rank].clone())
        self.shards = shards

    @torch.no_grad()
    def publish(self) -> None:
        # Gradients that are not finite skip the update, and must not reach parameters through hidden dependencies.
        self._comm.part()
        gathering = []
        for names in self.buckets:
            packed = torch.cat([self.shards[name].reshape(1, -1) for name in names], dim=1)
            gathering.append(self._comm.start_all_gather(packed, self.layout.axes_of(names[0]).shard))
        for names, pending in zip(self.buckets, gathering, strict=True):
            parts = pending.wait().split([self.shards[name].numel() for name in names], dim=1)
            for name, part in zip(names, parts, strict=True):
                parameter = self._parameters[name]
                parameter.copy_(part.reshape(-1, *parameter.shape[1:])[: parameter.shape[0]])

    def _start(self, grads: list[Tensor], names: Sequence[str]) -> Pending[list[Tensor]]:
        shard, scale = self.layout.axes_of(names[0]).shard, 1.0 / self._copies.size
        padded = [pad_rows(grad.to(self._precision.reduce), shard.size) for grad in grads]
        packed = torch.cat([grad.reshape(shard.size, -1) for grad in padded], dim=1)
        if shard.size == 1:
            packed = packed * scale
        scattering = self._comm.start_reduce_scatter(packed, shard, scale=scale)
        return PendingParts(scattering, [self.shards[name].shape for name in names], dim=1)


def fill_buckets(sizes: Mapping[str, int], limit_bytes: int) -> list[list[str]]:
    """Group adjacent tensors into buckets of at most `limit_bytes`; a larger tensor has a bucket of its own.

    Args:
        sizes: Bytes of each tensor by name, in order.
        limit_bytes: Largest size of a bucket of several tensors.

    Returns:
        Names of each bucket.
    """
    buckets: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not buckets or filled + size > limit_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Append rows of zeros to a tensor until its number of rows is divisible by `multiple`."""
    rows = -x.shape[0] % multiple
    if rows == 0:
        return x
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows))


def take_grad(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter and reset `parameter.grad` to None."""
    grad = parameter.grad
    assert grad is not None, "a parameter has no gradient after the backward pass"
    parameter.grad = None
    return grad
