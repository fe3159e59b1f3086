"""What happens to gradients between the last backward pass and the update.

Each rank holds what it computed alone; `Gradients` turns that into the gradient of the whole batch, and knows its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from nxtrain.backends.base import Collectives
from nxtrain.mesh import Axis, Mesh
from nxtrain.sharding import ParamTable, Piece


class Gradients:
    """The gradients of one rank's parameters.

    Where several micro-batches or data parallel ranks are summed in a wider type than the parameters have, sums of that
    type are kept here; otherwise autograd's own `.grad` is the sum.

    Args:
        parameters: By name, as in the model.
        table: How each is cut.
        mesh: The axes of this rank.
        comm: Collectives.
        put: Copies a host tensor to the device.
        dtype: Type of the sums over micro-batches and ranks.
        num_micro: Micro-batches per step.
        bucket_bytes: Size of one data parallel all-reduce.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        table: ParamTable,
        mesh: Mesh,
        comm: Collectives,
        put: Callable[[Tensor], Tensor],
        *,
        dtype: torch.dtype,
        num_micro: int,
        bucket_bytes: int = 64 << 20,
    ) -> None:
        self._parameters, self._table, self._mesh, self._comm = parameters, table, mesh, comm
        self._bucket_bytes = bucket_bytes
        self._sums: dict[str, Tensor] = {}
        self.norm_weights = SquareSum(table, mesh.tp, put)
        if num_micro > 1 or mesh.dp.size > 1:
            for name, parameter in parameters.items():
                if parameter.dtype != dtype:
                    self._sums[name] = put(torch.zeros(parameter.shape, dtype=dtype))
                    parameter.register_post_accumulate_grad_hook(_add_into(self._sums[name]))

    def clear(self) -> None:
        """Forget the last step's gradients."""
        for name, parameter in self._parameters.items():
            if name in self._sums:
                self._sums[name].zero_()
            parameter.grad = None

    def local(self) -> dict[str, Tensor]:
        """By parameter name, what this rank holds."""
        return {name: self._sums[name] if name in self._sums else _grad(p) for name, p in self._parameters.items()}

    @torch.no_grad()
    def reduce(self) -> dict[str, Tensor]:
        """Sum over the tensor parallel ranks what is partial there, average over the data parallel ones; in place."""
        grads = self.local()
        self._sum_over_tp(grads)
        dp = self._mesh.dp
        if dp.size > 1:
            for bucket in _buckets(list(grads.values()), self._bucket_bytes):
                self._comm.all_reduce_bucket(bucket, dp, scale=1.0 / dp.size)
        return grads

    def norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """L2 norm over the whole model of tensors shaped like the parameters: () float32, equal on all ranks."""
        return self._comm.all_reduce(self.norm_weights(tensors), self._mesh.model).sqrt()

    def _sum_over_tp(self, grads: Mapping[str, Tensor]) -> None:
        """Sum the weights that saw a slice of the sequence, and the copies of K/V heads that served other queries."""
        tp = self._mesh.tp
        if tp.size == 1:
            return
        partial: dict[int, list[Tensor]] = {}
        for name, grad in grads.items():
            spec = self._table[name]
            if spec.sequence_parallel:
                partial.setdefault(tp.size, []).append(grad)
            if spec.dim is not None:
                for piece, view in spec.views(grad, tp):
                    if piece.copies > 1:
                        partial.setdefault(piece.copies, []).append(view)
        for copies, views in partial.items():
            self._comm.all_reduce_bucket(views, tp.neighbours(copies))


class SquareSum:
    """Sum of squares over this rank's shards, weighted so that all ranks together count each entry of the model once.

    Args:
        table: How each parameter is cut.
        tp: Tensor parallel axis.
        put: Copies a host tensor to the device.
    """

    def __init__(self, table: ParamTable, tp: Axis, put: Callable[[Tensor], Tensor]) -> None:
        self._runs: list[tuple[str, int, int, int]] = []
        weights = []
        for name, spec in table.items():
            for start, length, copies in _runs(spec.pieces(tp)):
                self._runs.append((name, spec.dim or 0, start, length))
                weights.append(1.0 / copies)
        self._weights = put(torch.tensor(weights, dtype=torch.float32))

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """() float32 from tensors shaped like this rank's parameters."""
        norms = []
        for name, dim, start, length in self._runs:
            tensor = tensors[name].detach()
            part = tensor if length == tensor.shape[dim] else tensor.narrow(dim, start, length)
            norms.append(torch.linalg.vector_norm(part, dtype=torch.float32))
        return (torch.stack(norms).square() * self._weights).sum()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What to multiply gradients with so that their norm stays below `limit`: () float32; 0 for no limit.

    Source: torch.nn.utils.clip_grad_norm_.
    """
    if limit == 0:
        return torch.ones_like(norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _add_into(total: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        total.add_(_grad(parameter))
        parameter.grad = None

    return hook


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in every step"
    return parameter.grad


def _buckets(tensors: list[Tensor], limit_bytes: int) -> list[list[Tensor]]:
    """Group tensors of one type, last first (the order in which backward finishes them), up to a size."""
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in reversed(tensors):
        if not buckets or size + tensor.nbytes > limit_bytes or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return buckets


def _runs(pieces: tuple[Piece, ...]) -> list[tuple[int, int, int]]:
    """Join neighbouring pieces with equally many copies: (local start, local length, copies); padding included."""
    runs: list[tuple[int, int, int]] = []
    for piece in pieces:
        if runs and runs[-1][2] == piece.copies:
            start, length, copies = runs[-1]
            runs[-1] = (start, length + piece.local_length, copies)
        else:
            runs.append((piece.local_start, piece.local_length, piece.copies))
    return runs
