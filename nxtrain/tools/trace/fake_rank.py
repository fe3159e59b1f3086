"""Memory by kind of one rank's training step in any world, traced with fake tensors, which have no storage.

The rank has no real peers: torch's fake process group returns at once. The step runs eagerly, with torch's kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools import fake_collectives  # noqa: F401  shapes of the results of torch's collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import new_group
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakTensorKeyDictionary

from nxtrain.backends.base import Support
from nxtrain.backends.c10d import C10dBackend
from nxtrain.backends.cpu_attention import blocked_attention
from nxtrain.backends.flash_ranges import Call, FlashKernel, FlashRanges
from nxtrain.backends.ranged_attention import RangedAttention, whole_rows
from nxtrain.backends.torch_attention import sdpa
from nxtrain.backends.torch_kernels import FusedKernels, row_tiles
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.kernels import Float8Matrix, Grouping, KeyRanges, RowGroups, Rows
from nxtrain.common.mesh import Axis, Mesh, StateAxes
from nxtrain.common.process.greetings import suppress_gloo_messages
from nxtrain.common.sequence_cut import SequenceCut
from nxtrain.config.check import Resolved, family_of, resolve_model
from nxtrain.plan.job import Attention, Job
from nxtrain.plan.memory import Bytes
from nxtrain.plan.moments import in_flight
from nxtrain.train.build import build_mesh, build_model, build_state
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import TrainState, train_step


@dataclass(frozen=True)
class Traced:
    """Traced memory of a rank by kind, in bytes."""

    params: int  # trained parameters, as the rank stores them
    frozen: int  # other parameters
    optimizer: int  # optimizer state, including ZeRO-1's shards of the parameters
    step: int  # peak of everything else in a step: gradients, activations, logits and buffers

    @property
    def total(self) -> int:
        """Sum over all kinds of memory in bytes."""
        return self.params + self.frozen + self.optimizer + self.step

    def compared_with(self, predicted: Bytes) -> dict[str, tuple[int, int]]:
        """Predicted and traced bytes by kind of memory, without the memory of libraries."""
        step = predicted.grads + predicted.activations + predicted.logits + predicted.buckets
        return {
            "params": (predicted.params, self.params),
            "frozen": (predicted.frozen, self.frozen),
            "optimizer": (predicted.optimizer, self.optimizer),
            "step": (step, self.step),
            "total": (predicted.total - predicted.workspace, self.total),
        }


TILE_ENTRIES = 1 << 20  # tensor entries that an optimizer update processes at a time; on devices a few MB as well


class _Flash(FlashKernel):
    """Memory model of FlashAttention 2: queries' gradients in float32, and K/V gradients for each query head.

    FlashAttention rounds sizes up to multiples of 128 tokens and 32 entries of a head. Its deterministic kernel has
    several copies of the queries' gradients. Neither is counted.

    Source: `mha_bwd` of aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, torch at 03b7c19.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        workspace = [torch.empty_like(q, dtype=torch.float32)]
        if q.shape[2] > k.shape[2]:
            workspace += [k.new_empty(*k.shape[:2], *q.shape[2:]) for _ in range(2)]
        return grads


class _Kernels(FusedKernels):
    """torch's kernels without reads of tensor values, and with the attention memory of another device.

    Args:
        attention: Kind of attention in layers without a sliding window.
        windowed: Kind of attention in layers with a sliding window.
    """

    def __init__(self, attention: Attention, windowed: Attention) -> None:
        self._attention, self._windowed = attention, windowed
        self._flash = FlashRanges(_Flash(), WeakTensorKeyDictionary())

    def float8_matmul(self, a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        return a.values.new_empty(len(a.values), len(b.values), dtype=dtype)  # without the copies of an emulation

    def grouping(self, dtype: torch.dtype, sizes: Sequence[int]) -> Grouping:
        return Grouping(counted=False, even=True)

    def grouped_matmul(self, rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
        return rows.new_empty(len(rows), matrices.shape[2])

    def grouped_gradient(self, left: Tensor, right: Tensor, groups: RowGroups, out: Tensor) -> None:
        """Do nothing, since the values of the result are not traced."""

    def tiles(self, shapes: Mapping[str, Sequence[int]]) -> list[list[Rows]]:
        return [[rows] for rows in row_tiles(shapes, TILE_ENTRIES)]

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._attention == "probabilities":
            return blocked_attention(q, k, v)
        if self._attention == "blocked":
            return RangedAttention.apply(q, k, v, whole_rows(q, None), self)  # type: ignore[no-any-return]
        if self._attention == "scores":
            with sdpa_kernel(SDPBackend.MATH):
                return sdpa(q, k, v)
        return sdpa(q, k, v, grouped=self._attention == "grouped")

    def document_attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        kind = self._attention if window is None else self._windowed
        if kind == "blocked":
            return super().document_attention(q, k, v, starts, window)
        # Calls for each document, and FlexAttention, need no more memory than one call for the row.
        return self.attention(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        if self._windowed == "grouped":
            return self._flash.attend(q, k, v, replace(ranges, starts=None))
        return super().attend(q, k, v, ranges)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._windowed == "grouped":
            return self._flash.attend_backward(grad, q, k, v, out, log_sums, replace(ranges, starts=None))
        return super().attend_backward(grad, q, k, v, out, log_sums, ranges)


class _Collectives(C10dCollectives):
    """Collectives of a rank that creates only its own process groups, since no peer takes part in creating them."""

    def group(self, axis: Axis) -> dist.ProcessGroup:
        if axis.groups not in self._groups and axis.size < self._world:
            ranks = list(axis.group_of(dist.get_rank()))
            with suppress_gloo_messages():  # torch-xla replaces `dist.new_group` by one without this argument
                self._groups.setdefault(axis.groups, new_group(ranks, use_local_synchronization=True))
        return super().group(axis)

    def _link(self, mesh: Mesh) -> None:
        """Use the pipeline's own process group for transfers between stages."""


class FakeBackend(C10dBackend):
    """Backend of one rank whose tensors have no storage and whose peers do not exist."""

    name = "fake"

    def __init__(
        self, world: int, rank: int, ranks_per_node: int, attention: Attention, windowed: Attention = "blocked"
    ) -> None:
        self.device = torch.device("cpu")
        self.world, self.rank = world, rank
        self.local_world, self.local_rank = min(world, ranks_per_node), rank % ranks_per_node
        self.collectives = _Collectives(world)
        self.kernels = self.host_kernels = _Kernels(attention, windowed)
        if world > 1:
            with suppress_gloo_messages():
                dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    @staticmethod
    def support() -> Support:
        return Support(True, "shapes need no device")

    def device_mesh(self, axes: StateAxes) -> DeviceMesh:
        with unset_fake_temporarily():  # it reads ranks from a tensor
            return super().device_mesh(axes)

    def put(self, x: Tensor) -> Tensor:
        return x

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        raise AssertionError("fake tensors have no values")

    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        return torch.tensor(values, dtype=torch.float32).unbind()


def trace_job(job: Job, stage: int) -> Traced:
    """Trace the memory of a planned job, on the rank of a stage that has the end of the sequence.

    The step has as many micro-batches as memory depends on.

    Raises:
        ConfigError: Fake tensors cannot represent the job.
    """
    config = job.config
    if config.parallel.offload:
        reason = "a trace cannot separate tensors of host and device"
        raise ConfigError([Problem("parallel.offload", reason, hint="omit --trace, or use parallel.offload=false")])
    if job.method == "qlora":
        reason = "a trace has shapes only, but quantized matrices need a kernel"
        raise ConfigError([Problem("finetune.method", reason, hint="omit --trace, or use finetune.method=lora")])
    family = family_of(config)
    parallel = config.parallel
    most = 3 * parallel.pp if parallel.virtual_pp > 1 else in_flight(job, stage) + 2
    batch = parallel.dp * config.train.micro_batch * min(job.num_micro, most)
    logits_mib = config.train.logits_mib(job.backend)
    changes = {  # settings that are resolved for the job's device would be resolved otherwise on this one
        "parallel": parallel.model_copy(update={"cp_method": job.cp_method}),
        "train": config.train.model_copy(update={"global_batch": batch, "loss_chunk_mib": logits_mib}),
        "compile": config.compile.model_copy(update={"torch_compile": False}),
    }
    resolved = Resolved(config.model_copy(update=changes), family, resolve_model(config))
    cut = SequenceCut.of(config.train.seq_len, parallel.cp, parallel.cp_layout)
    rank = stage * (job.world // parallel.pp) + cut.rank_of_last * parallel.tp
    kinds = job.full_attention, job.windowed_attention
    return trace_rank(resolved, job.world, rank, job.machine.devices, *kinds)


def trace_rank(
    resolved: Resolved,
    world: int,
    rank: int,
    ranks_per_node: int,
    attention: Attention,
    windowed: Attention = "blocked",
) -> Traced:
    """Trace the memory of one rank's training step.

    Args:
        resolved: Configuration with all parallel degrees; all micro-batches of its global batch run.
        world: Number of ranks.
        rank: Rank to trace.
        ranks_per_node: Number of ranks on each node.
        attention: Kind of attention in layers without a sliding window.
        windowed: Kind of attention in layers with a sliding window.
    """
    backend = FakeBackend(world, rank, ranks_per_node, attention, windowed)
    with closing(backend), FakeTensorMode(allow_non_fake_inputs=True):
        mesh = build_mesh(resolved, world, rank, ranks_per_node)
        backend.lay_out(mesh)
        return step_memory(resolved, backend, mesh)


def step_memory(resolved: Resolved, backend: C10dBackend, mesh: Mesh) -> Traced:
    """Memory of one training step on an open backend, counted operation by operation."""
    state = build_state(resolved, build_model(resolved, backend, mesh, init="zeros"), backend, mesh)
    parameters = [_own(p) for p in state.model.parameters()]
    trained = [_own(p) for p in state.model.parameters() if p.requires_grad]
    optimizer_state = [_own(x) for x in state.data_parallel.shards.values()]
    for kind in state.optimizer.state.values():
        optimizer_state += [_own(x) for x in kind.values()]
    batch = zero_batch(resolved, state)
    with LiveBytes([*parameters, *optimizer_state, *state.model.buffers()]) as step:
        train_step(state, batch, 1e-3)
    held = {x.untyped_storage()._cdata for x in parameters}
    apart = [x for x in optimizer_state if x.untyped_storage()._cdata not in held]
    trained_bytes = _num_bytes(trained)
    return Traced(trained_bytes, _num_bytes(parameters) - trained_bytes, _num_bytes(apart), step.peak)


def zero_batch(resolved: Resolved, state: TrainState) -> DeviceBatch:
    """Batch of zeros for one rank, with the shapes of its part of the global batch."""
    train, mesh = resolved.config.train, state.mesh
    num_micro = train.global_batch // (train.micro_batch * mesh.dp_size)
    tokens = torch.zeros(num_micro, train.micro_batch, train.seq_len, dtype=torch.int64)
    answers: dict[str, Tensor] | None = None
    tuning = resolved.config.finetune
    if state.preferences is not None:
        values = torch.zeros(num_micro, train.micro_batch, 2 * tuning.pairs_per_row)
        answers = {"numbers": tokens, "lengths": values}
        if tuning.stores_reference:
            answers["reference"] = values
        if tuning.objective == "kto":
            answers["labels"] = values
    padding = tokens.bool() if state.has_padding else None
    tokens_axis = mesh.tp if state.sequence_parallel else None
    given = (state.backend.put, None, state.context_parallel, answers, padding, tokens_axis)
    batch = DeviceBatch.of(tokens, tokens, *given)
    if resolved.config.data.doc_mask:  # not by `DeviceBatch.of`, which would read the values of document starts
        length = batch.inputs[0].shape[-1]
        starts = [state.backend.put(rows[..., :length].contiguous()) for rows in tokens]
        batch = replace(batch, starts=starts)
    if tuning.objective == "kto":
        batch = replace(batch, swapped=replace(DeviceBatch.of(tokens, tokens, *given), starts=batch.starts))
    return batch


def _own(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _num_bytes(tensors: list[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live storages of all tensors that operations return in this context.

    A storage counts once, however many views share it, from the operation that returns it until it is freed. Full
    sharding frees and restores parameters by resizing their storage, which is not an operation. So resizes of storages
    count too. Storages of the `excluded` tensors do not count.

    Attributes:
        now: Bytes of live storages at this moment.
        peak: Maximum of `now` so far.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._seen: dict[int, Any] = {}
        self._excluded = {x.untyped_storage()._cdata for x in excluded}

    def __enter__(self) -> LiveBytes:
        super().__enter__()
        self._resize = resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage)
            return storage

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exc_info)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._excluded:
            return
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._freed(key))
        self.now += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._seen[key]
