"""The gradient of the whole batch, from what each rank computed alone, and its norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from nxtrain.distributed.collectives import Collectives
from nxtrain.parallel.data_parallel import DataParallel
from nxtrain.sharding import Layout, ShardSpec


class Gradients:
    """The gradients of the entries that a rank updates.

    Args:
        data_parallel: How they are averaged over the data parallel ranks.
        comm: Collectives.
        put: Copies a host tensor to the device.
        rounds: As `Kernels.rounds`: tensor parallel ranks compute different gradients of what all of them hold.
    """

    def __init__(
        self,
        data_parallel: DataParallel,
        comm: Collectives,
        put: Callable[[Tensor], Tensor],
        *,
        rounds: bool = False,
    ) -> None:
        self._data_parallel, self._comm, self._layout = data_parallel, comm, data_parallel.layout
        self.square_sum = SquareSum(self._layout, data_parallel.shards, put)
        self._tp_sums = _TensorParallelSums(self._layout, data_parallel.shards, comm, put)
        self._tp_means = _TensorParallelMeans(self._layout, comm) if rounds else None
        self._tied_sums = _TiedSums(self._layout, comm)

    @torch.no_grad()
    def reduce(self) -> dict[str, Tensor]:
        """Average over the data parallel ranks; sum what is partial on tensor parallel ones, and over tied copies."""
        grads = self._data_parallel.reduce()
        self._tp_sums(grads)
        if self._tp_means is not None:
            self._tp_means(grads)
        self._tied_sums(grads)
        return grads

    def norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """L2 norm over the whole model of tensors shaped like the shards: () float32, equal on all ranks."""
        return self._comm.all_reduce(self.square_sum(tensors.items()), self._layout.mesh.state).sqrt()

    def count(self, marks: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Ones over the whole model in tensors of 0 and 1 shaped like the shards: () float32, equal on all ranks."""
        return self._comm.all_reduce(self.square_sum(marks), self._layout.mesh.state)


class SquareSum:
    """Sum of squares over this rank's shards, weighted so that all ranks together count each entry of the model once.

    Each row is summed by itself, and then the rows. On CPUs torch's norm of a whole matrix adds millions of small
    squares to one large float32 sum, which loses 0.2% of a gradient of 32000 x 1024 (torch 2.9).

    Args:
        layout: The entries that this rank has.
        shards: Tensors of the shapes to come.
        put: Copies a host tensor to the device.
    """

    def __init__(self, layout: Layout, shards: Mapping[str, Tensor], put: Callable[[Tensor], Tensor]) -> None:
        mixed = {name for name in layout if layout.mixes_copies(name)}
        weights = [
            1.0 if name in mixed else _weight(spec, spec.pieces(layout.mesh.tp)[0].copies)
            for name, spec in ((name, layout.table[name]) for name in layout)
        ]
        self._weights = put(torch.tensor(weights, dtype=torch.float32))
        self._row_weights = {
            name: put(1.0 / torch.tensor(layout.row_copies(name, shards[name].shape[0]), dtype=torch.float32))
            for name in layout
            if name in mixed
        }

    @torch.no_grad()
    def __call__(self, tensors: Iterable[tuple[str, Tensor]]) -> Tensor:
        """() float32 from the names and tensors of all of this rank's shards, in the layout's order."""
        sums = []
        for name, tensor in tensors:
            squares = torch.linalg.vector_norm(_rows(tensor), dim=1, dtype=torch.float32).square()
            sums.append((squares * self._row_weights[name] if name in self._row_weights else squares).sum())
        return (torch.stack(sums) * self._weights).sum()


def _rows(tensor: Tensor) -> Tensor:
    """(R, C) view: a vector is one row."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(1)


def _weight(spec: ShardSpec, copies: int) -> float:
    return 0.0 if spec.tied_to else 1.0 / copies


class _TiedSums:
    """Sums the gradients of an embedding and of its copy on the last pipeline stage, so that both stay equal."""

    def __init__(self, layout: Layout, comm: Collectives) -> None:
        self._pp, self._comm = layout.mesh.pp, comm
        self._names = [name for name in layout if layout.table[name].is_tied]

    def __call__(self, grads: dict[str, Tensor]) -> None:
        """Sum in place."""
        peer = 0 if self._pp.rank else self._pp.size - 1
        for name in self._names:
            own = grads[name].float()
            grads[name] = own + self._comm.exchange(own, self._pp, peer)


class _TensorParallelSums:
    """Sums in float32 what saw a slice of the sequence, and the copies of K/V heads that served other queries.

    A fused matrix is summed as a whole, its other rows in vain. What differs between ranks is data on the device, so
    that the graph is the same on all of them.
    """

    def __init__(
        self, layout: Layout, shards: Mapping[str, Tensor], comm: Collectives, put: Callable[[Tensor], Tensor]
    ) -> None:
        self._tp, self._comm = layout.mesh.tp, comm
        self._whole: dict[int, list[str]] = {}
        self._rows: dict[int, dict[str, Tensor]] = {}
        for name in layout:
            spec = layout.table[name]
            copies = {piece.copies for piece in spec.pieces(self._tp)}
            if spec.sequence_parallel and self._tp.size > 1:
                self._whole.setdefault(self._tp.size, []).append(name)
            if spec.dim is None:
                continue
            for count in copies - {1}:
                if len(copies) == 1:
                    self._whole.setdefault(count, []).append(name)
                    continue
                shape = (-1, *[1] * (shards[name].dim() - 1))
                copied = torch.tensor(layout.row_copies(name, shards[name].shape[0])) == count
                self._rows.setdefault(count, {})[name] = put(copied.view(shape))

    def __call__(self, grads: dict[str, Tensor]) -> None:
        """Sum in place."""
        for copies in self._whole.keys() | self._rows.keys():
            whole, rows = self._whole.get(copies, []), self._rows.get(copies, {})
            tensors = [grads[name] for name in (*whole, *rows)]
            reduced = self._comm.start_all_reduce_bucket(tensors, self._tp.neighbours(copies), torch.float32).wait()
            for name, total in zip((*whole, *rows), reduced, strict=True):
                grads[name] = torch.where(rows[name], total, grads[name]) if name in rows else total


class _TensorParallelMeans:
    """Averages in float32 what all tensor parallel ranks compute alike, but for how their hardware rounds at random.

    These are the norm weights of a run without sequence parallelism. Elsewhere a sum makes their gradients equal.
    """

    def __init__(self, layout: Layout, comm: Collectives) -> None:
        self._tp, self._comm = layout.mesh.tp, comm
        specs = layout.table.items()
        self._names = [name for name, spec in specs if spec.dim is None and not spec.sequence_parallel]

    def __call__(self, grads: dict[str, Tensor]) -> None:
        """Average in place."""
        if self._tp.size == 1 or not self._names:
            return
        tensors = [grads[name] for name in self._names]
        mean = self._comm.start_all_reduce_bucket(tensors, self._tp, torch.float32, scale=1.0 / self._tp.size)
        grads.update(zip(self._names, mean.wait(), strict=True))


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What to multiply gradients with so that their norm stays below `limit`: () float32; 0 for no limit.

    Source: torch.nn.utils.clip_grad_norm_.
    """
    if limit == 0:
        return torch.ones_like(norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)
