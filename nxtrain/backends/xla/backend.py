"""PyTorch/XLA backend: lazy tensors, replica groups instead of process groups, one graph per step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.base import DEFAULTS, Backend, BackendSettings, Support, fetched_names
from nxtrain.backends.diagnostics import Diagnostics
from nxtrain.backends.rounding import round_one_by_one
from nxtrain.backends.torch_kernels import PlainKernels, SavingProduct
from nxtrain.backends.xla.environment import refuse_dead_variables, support
from nxtrain.backends.xla.graphs import freeze_older_objects, hash_of, pending
from nxtrain.backends.xla.looped_attention import LoopedBlocks
from nxtrain.backends.xla.world import join
from nxtrain.common.distributed.collectives import Collectives, Done, Op, Pending, RowCounts
from nxtrain.common.distributed.failures import FailureReporter
from nxtrain.common.errors import BackendError
from nxtrain.common.kernels import RoundingKey
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.process.placement import Placement


class XlaCollectives(Collectives):
    """Collectives as XLA graph operations with explicit replica groups.

    Every call names its replica groups, since an empty list means the whole world. Layouts are never pinned, since a
    pinned all-gather lowers to a padded all-reduce.

    A collective needs the same program on all its ranks, and pipeline stages run different programs. So a collective
    over an axis that spans stages is a separate graph, equal on all ranks. On Neuron all ranks of a replica group must
    load the program of a collective; otherwise a rank that has loaded the program waits for a rank that still runs
    another program. XLA has no point-to-point send: both ends of a transfer all-gather their tensors, and the receiver
    keeps the tensor of the other end.

    Args:
        boundary: Step boundary of the backend, which runs the recorded graph.
        meet: Host barrier over all ranks; None for torch-xla's own rendezvous.

    Source: src/neuronx_distributed/pipeline/comm.py in https://github.com/aws-neuron/neuronx-distributed at v0.18.
    """

    lazy = True

    def __init__(self, boundary: Callable[[], None], meet: Callable[[], None] | None = None) -> None:
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        self._xm: Any = xm
        self._xr: Any = xr
        self._boundary, self._meet = boundary, meet
        self._is_first: dict[int, Tensor] = {}  # by position in a pair

    def part(self) -> None:
        # torch-xla orders collectives by a token: the first number of the last result, times 0, is added to the next
        # input. NaN or infinity there makes the whole next result NaN. Data dependencies need no token.
        import torch_xla

        torch_xla._XLAC._set_all_reduce_token(torch_xla._XLAC._xla_get_default_device(), None)

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        return Done(x.copy_(self._reduced(op, [x], axis, 1.0)[0]))

    def start_all_gather(self, x: Tensor, axis: Axis) -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        with self._own_graph(axis):
            out = self._xm.all_gather(x, dim=0, groups=_groups(axis), pin_layout=False)
        return Done(out)

    def start_all_to_all(self, x: Tensor, axis: Axis, rows: RowCounts | None = None) -> Pending[Tensor]:
        assert rows is None, "a graph cannot depend on numbers of rows"
        if axis.size == 1:
            return Done(x)
        with self._own_graph(axis):
            out = self._xm.all_to_all(x, 0, 0, axis.size, groups=_groups(axis), pin_layout=False)
        return Done(out)

    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        with self._own_graph(axis):
            out = self._xm.reduce_scatter("sum", x, scale, 0, axis.size, groups=_groups(axis), pin_layout=False)
        return Done(out)

    def start_all_reduce_bucket(
        self, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        cast = [tensor.to(dtype) for tensor in tensors]
        return Done(cast if axis.size == 1 else self._reduced("sum", cast, axis, scale))

    def start_send(self, x: Tensor, axis: Axis, to: int) -> Pending[None]:
        self.exchange(x, axis, to)
        return Done(None)

    def start_receive(self, like: Tensor, axis: Axis, source: int) -> Pending[Tensor]:
        return Done(self.exchange(like, axis, source))

    def exchange(self, x: Tensor, axis: Axis, peer: int) -> Tensor:
        pair = axis.pairs(peer)
        if pair.rank not in self._is_first:
            self._is_first[pair.rank] = torch.tensor([pair.rank == 0]).to(x.device)
        is_first = self._is_first[pair.rank]
        with self._own_graph(pair):
            both = self._xm.all_gather(x, dim=0, groups=_groups(pair), pin_layout=False)
            # Selected within the graph by a device value, since the graph is equal at both ends. After the graph, the
            # selection would become part of the next graph, and make that graph differ between ranks.
            of_first, of_second = both.chunk(2)
            out = torch.where(is_first, of_second, of_first)
            del both, of_first, of_second  # else they would be results of the graph too
        return out

    def start_shift(self, x: Tensor, axis: Axis, hops: int = 1) -> Pending[Tensor]:
        if hops % axis.size == 0:
            return Done(x)
        pairs: list[list[int]] = []
        for group in _groups(axis):
            pairs += [[group[i - hops % axis.size], group[i]] for i in range(axis.size)]
        return Done(self._xm.collective_permute(x, pairs))

    @contextmanager
    def _own_graph(self, axis: Axis) -> Iterator[None]:
        """Record the operations of this context as a separate graph if the axis spans pipeline stages."""
        if axis.spans_stages:
            self._boundary()
        yield
        if axis.spans_stages:
            self._boundary()

    def _reduced(self, op: Op, tensors: Sequence[Tensor], axis: Axis, scale: float) -> list[Tensor]:
        # torch-xla's in-place form gives one collective for all, but loses the result of a tensor that is a view or was
        # summed in place, such as an accumulated gradient. It is safe on fresh tensors, and XLA elides the copies.
        # Copies are made before the graph of a collective of its own, so that bases of views are not part of it.
        fresh = [tensor.clone() for tensor in tensors]
        with self._own_graph(axis):
            self._xm.all_reduce(op, fresh, scale=scale, groups=_groups(axis), pin_layout=False)
        return fresh

    def barrier(self) -> None:
        if self._meet is not None:
            self._meet()
        elif self._xr.world_size() > 1:
            self._xm.rendezvous("nxtrain")


class XlaKernels(PlainKernels):
    """Kernels of elementary operations, with XLA's bitcasts, loops and optimization barriers."""

    _blocks = LoopedBlocks()

    def __init__(self) -> None:
        import torch_xla.core.xla_builder as xb
        import torch_xla.core.xla_op_registry as registry

        # torch-xla does not lower a view of another type: the tensor would go through the host.
        types = {torch.int32: xb.Type.S32, torch.float32: xb.Type.F32}
        self._bitcasts = {
            dtype: registry.register(f"nxtrain_bitcast_{of}", lambda x, of=of: x.bitcast(of))
            for dtype, of in types.items()
        }

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        # The transposed weight is a view on eager devices. Here, where a graph ends between forward and backward, it
        # would be a copy for each micro-batch.
        out: Tensor = SavingProduct.apply(x, weight, self)
        return out

    def bits(self, x: Tensor) -> Tensor:
        bits: Tensor = self._bitcasts[torch.int32](x)
        return bits

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        round_one_by_one(x, out, key, step, bitcast=lambda value, dtype: self._bitcasts[dtype](value))

    def recompute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        # torch-xla puts a barrier before the second call. Without a barrier, a compiler finds both calls equal, merges
        # them and keeps all activations. XLA's compiler for CPUs drops barriers halfway and may do so even with one.
        # torch's recomputation has no barrier, and fails on XLA tensors (torch 2.9).
        from torch_xla.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return function(*inputs)
        # A bound method would send the module's parameters through the barrier as well.
        out: Tensor = checkpoint(partial(function), *inputs, preserve_rng_state=False)
        return out

    def order(self, tensors: Sequence[Tensor]) -> None:
        import torch_xla.core.xla_model as xm

        xm.optimization_barrier_(list(tensors))


class XlaDiagnostics(Diagnostics):
    """Counters of torch-xla, such as the number of compiled graphs."""

    def num_compiled(self) -> int:
        from torch_xla.debug import metrics

        # The counter grows while a boundary compiles, in the calling thread. The number of cached graphs would not do:
        # it falls when old graphs are evicted.
        return int(metrics.counter_value("UncachedCompile") or 0)


class XlaBackend(Backend):
    """PyTorch/XLA backend with one device per rank, for any PJRT plugin.

    Args:
        settings: `hang_timeout_s` limits the waits of hosts for each other; the limit is longer where a rank may
            compile. Collectives inside a graph have the runtime's own limit.
        sync: Function that ends and runs the graph at a step boundary, for tests with several devices in one process.
        meet: Host barrier over all ranks, for the same tests. With one process per rank, the barrier of the host group
            is used instead.
    """

    name = "xla"
    diagnostics: Diagnostics = XlaDiagnostics()
    compiles_at_first_use = True
    is_asynchronous = True

    def __init__(
        self,
        settings: BackendSettings = DEFAULTS,
        *,
        sync: Callable[[], None] | None = None,
        meet: Callable[[], None] | None = None,
    ) -> None:
        support = self.support()
        if not support.ok:
            raise BackendError(f"backend.name={self.name} cannot run here: {support.reason}")
        refuse_dead_variables(os.environ)
        import torch_xla
        import torch_xla.runtime as xr

        self._sync: Callable[[], None] = sync or torch_xla.sync
        placement = Placement.read()
        self._hosts = join(placement, settings.hang_timeout_s) if placement.world > 1 else None
        self._compared, self._num_compared = "", 0
        self._mesh: Mesh | None = None
        self.device = torch_xla.device()
        self.rank, self.world = xr.global_ordinal(), xr.world_size()
        self.local_rank, self.local_world = xr.local_ordinal(), xr.local_device_count()
        if self._hosts is not None:
            self.host_group = self._hosts.group
            self.local_rank, self.local_world = placement.local_rank, placement.local_world
            freeze_older_objects()
            meet = self._hosts.barrier
            self._store = dist.distributed_c10d._get_default_store()
            self._failures = FailureReporter(self._store, placement.rank, settings.hang_timeout_s, self._name_of)
        self.collectives = XlaCollectives(self.step_boundary, meet)
        self.kernels, self.host_kernels = XlaKernels(), PlainKernels()

    @staticmethod
    def support() -> Support:
        return support()

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        # After the boundary the values are device buffers: reading them moves bytes and builds no graph. Any operation
        # on the device would, also `detach`.
        self.step_boundary()
        read = [value.cpu().float().reshape(-1) for value in values.values()]
        return dict(zip(fetched_names(values), torch.cat(read).tolist(), strict=True))

    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        # A 0-d host tensor is folded by value: 0 and 1 become constants, equal values one parameter, and each such
        # coincidence is a new graph. Elements of a longer vector are opaque.
        uploaded = torch.tensor([*values, -1.0], dtype=torch.float32).to(self.device)
        return tuple(uploaded[i] for i in range(len(values)))

    def lay_out(self, mesh: Mesh) -> None:
        self._mesh = mesh
        if mesh.pp_size > 1 and self._hosts is not None:
            self._hosts.compare_among(mesh.stage)

    def step_boundary(self) -> None:
        self._compare()
        self._sync()

    def compare_graphs(self, work: str) -> None:
        self._compared, self._num_compared = work, 0

    def _compare(self) -> None:
        """Compare the graph that is about to run between ranks, if `compare_graphs` has enabled comparisons."""
        if self._compared and self._hosts is not None:
            self._num_compared += 1
            computed = pending(self.device)
            graph = hash_of(computed) if computed else ""
            self._hosts.compare(f"{self._compared}, graph {self._num_compared}", graph)

    def _name_of(self, rank: int) -> str:
        return self._mesh.rank_name(rank) if self._mesh is not None else f"rank {rank}"

    def close(self) -> None:
        super().close()
        if self._hosts is not None and not self._ends_early:
            dist.destroy_process_group()


def _groups(axis: Axis) -> list[list[int]]:
    return [list(ranks) for ranks in axis.groups]
