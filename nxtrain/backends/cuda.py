"""CUDA backend: NCCL between processes, one GPU per rank, torch's fused kernels."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nxtrain.backends import flash_ranges, flex_attention, float8_products, nccl_trace, sdpa_kernels
from nxtrain.backends.attention_choice import (
    CUDA_KERNELS,
    AttentionChoice,
    AttentionKind,
    AttentionShape,
    choose_mixed,
    choose_torch,
    without_flash,
)
from nxtrain.backends.base import DEFAULTS, BackendSettings, Support
from nxtrain.backends.c10d import AcceleratorBackend, C10dDiagnostics
from nxtrain.backends.capability import bf16_warning
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.diagnostics import DeviceEvent
from nxtrain.backends.flash_ranges import FlashRanges, TorchFlash
from nxtrain.backends.flex_attention import Attend
from nxtrain.backends.float8_products import tiled_exponents
from nxtrain.backends.ranged_attention import whole_rows
from nxtrain.backends.torch_attention import sdpa
from nxtrain.backends.torch_kernels import FusedKernels, PlainKernels, cross_entropy, masked_cross_entropy, row_tiles
from nxtrain.common.distributed.c10d_collectives import WAIT_CLOCK
from nxtrain.common.distributed.heartbeats import Queued
from nxtrain.common.errors import BackendError, ConfigError, Problem
from nxtrain.common.kernels import ANY_ROWS, Float8Matrix, Function, Grouping, KeyRanges, RowGroups, Rows
from nxtrain.common.machines import gpu_peaks
from nxtrain.common.mesh import Axis
from nxtrain.common.vocab import VocabColumns

Method = TypeVar("Method", bound=Callable[..., None])

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch type of each value of `precision.params`."""

ALLOCATIONS = 100_000
"""Most allocations in a snapshot of GPU memory, which keeps the newest."""

TILE_ENTRIES = 1 << 26
"""Entries that one optimizer kernel call updates: enough to fill a GPU, few enough to bound float32 copies."""

GROUPING_GPUS = (9, 10)
"""Major compute capabilities for which torch has grouped matrix products (torch 2.9 to 2.14)."""

GROUP_ROWS = 8
"""bfloat16 entries in 16 bytes, the address alignment of grouped matrix products."""


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Environment variable of cuBLAS, and its values with deterministic products; the first value costs no time.

Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility.
"""


@contextmanager
def deterministic(environ: Mapping[str, str]) -> Iterator[None]:
    """Make torch use deterministic kernels, and raise an error for operations without one.

    Raises:
        BackendError: The environment of this process leaves cuBLAS non-deterministic.
    """
    if environ.get(WORKSPACE) not in WORKSPACES:
        raise BackendError(
            f"backend.deterministic=true needs {WORKSPACE}={WORKSPACES[0]}, and the environment has "
            f"{environ.get(WORKSPACE) or 'none'}; unset it in the shell, and nxtrain launch and nxtrain train set it"
        )
    switches: Any = torch.utils.deterministic
    fills = switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    switches.fill_uninitialized_memory = False  # costs time, and nothing reads such memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        switches.fill_uninitialized_memory = fills


def group_options(axis: Axis) -> Any:
    """NCCL options for the process group of a mesh axis: a high priority stream for tp, defaults for others.

    Matrix products wait for tensor parallel collectives, which therefore run before those of dp.
    """
    if axis.name != "tp":
        return None
    options = torch.distributed.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


def _plain_in_graphs(plain: Method, fused: Method) -> Method:
    """Return a method that calls `plain` inside torch.compile, whose compiler fuses kernels, and `fused` elsewhere."""

    def method(*args: Any) -> None:
        (plain if torch.compiler.is_compiling() else fused)(*args)

    return method  # type: ignore[return-value]


class CudaKernels(FusedKernels):
    """torch's fused GPU kernels; `compile.torch_compile` also compiles the loss and the optimizer update.

    The compiler fuses the update of a parameter and its rounding into one kernel, which reads and writes each number
    once.

    Attributes:
        compiler: Backend of `torch.compile` for `fuse`; None if `fuse` compiles nothing.
        ranges: Flash kernel for documents, windows and context parallel ranks; None to use `flex` or blocks.
        copies: Host copies of uploaded integer tensors, for the offsets of flash kernel calls.
        flex: FlexAttention for documents and windows; None to compute attention by blocks.
        causal: Kernel of plain causal attention; `repeated` is a fused kernel that takes no grouped heads.
    """

    adds_products = True
    sums_lists = True
    makes_zeros = True
    compiler: str | None = None
    ranges: FlashRanges | None = None
    flex: Attend | None = None
    causal: Literal["fused", "repeated", "flex", "plain"] = "fused"

    def __init__(self) -> None:
        self.copies = WeakTensorKeyDictionary()

    def fuse(self, function: Function, *, any_size: bool = False) -> Function:
        if self.compiler is None:
            return function
        # A graph break is an error, not a slow run.
        compiled = torch.compile(function, backend=self.compiler, dynamic=any_size, fullgraph=True)
        return compiled  # type: ignore[return-value]

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, columns: VocabColumns, *, needs_grad: bool, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        # In a graph a mask costs no memory, and the compiler cannot fuse a scatter into a product. The top-k tokens of
        # a teacher would need one mask each.
        by_mask = torch.compiler.is_compiling() and targets.dim() == 1
        entropy = masked_cross_entropy if by_mask else cross_entropy
        return entropy(logits, targets, columns, needs_grad=needs_grad, z_loss=z_loss)

    adamw = _plain_in_graphs(PlainKernels.adamw, FusedKernels.adamw)
    replace = _plain_in_graphs(PlainKernels.replace, FusedKernels.replace)
    stochastic_round = _plain_in_graphs(PlainKernels.stochastic_round, FusedKernels.stochastic_round)

    def square_sums(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        norms: dict[int, Tensor] = {}
        for dtype in {tensor.dtype for tensor in tensors}:  # few kernels process a list of one type
            indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            of_type = torch._foreach_norm([tensors[index] for index in indices], dtype=torch.float32)
            norms.update(zip(indices, torch.stack(of_type).square().unbind(), strict=True))
        return [norms[index] for index in range(len(tensors))]

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        if a.is_cuda and a.dtype != total.dtype:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(a.to(total.dtype), b.to(total.dtype))

    def float8_matmul(self, a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        if not a.values.is_cuda:
            return super().float8_matmul(a, b, dtype, fast=fast)
        scales = a.scales, b.scales.t()
        if a.has_blocks:
            scales = tiled_exponents(a.scales), tiled_exponents(b.scales)
        fast = fast and not a.has_blocks
        return torch._scaled_mm(a.values, b.values.t(), scales[0], scales[1], out_dtype=dtype, use_fast_accum=fast)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.causal == "plain":
            return PlainKernels.attention(self, q, k, v)
        if self.causal == "flex" and self.flex is not None:
            return self.flex(q, k, v, torch.zeros(q.shape[1], q.shape[0], dtype=torch.int64, device=q.device))
        # Of torch's kernels without scores in memory, the only one for float32 takes no grouped heads.
        return sdpa(q, k, v, grouped=self.causal == "fused" and q.dtype != torch.float32)

    def grouping(self, dtype: torch.dtype, sizes: Sequence[int]) -> Grouping:
        is_aligned = all(size % GROUP_ROWS == 0 for size in sizes)
        if dtype == torch.bfloat16 and is_aligned and self._multiplies_groups():
            return Grouping(multiple=GROUP_ROWS, counted=False)
        return ANY_ROWS

    def grouped_matmul(self, rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
        if groups.counts is not None:
            return super().grouped_matmul(rows, matrices, groups)
        return torch._grouped_mm(rows, matrices, offs=groups.ends)

    def grouped_gradient(self, left: Tensor, right: Tensor, groups: RowGroups, out: Tensor) -> None:
        if groups.counts is not None:
            super().grouped_gradient(left, right, groups, out)
            return
        out.copy_(torch._grouped_mm(left.t(), right, offs=groups.ends))

    def _multiplies_groups(self) -> bool:
        """True if torch runs grouped products as one kernel on this GPU, without a copy of group ends to the host."""
        return torch.cuda.get_device_capability()[0] in GROUPING_GPUS

    def document_attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        if self.ranges is not None or self.flex is None:
            return super().document_attention(q, k, v, starts, window)
        return self.flex(q, k, v, whole_rows(q, starts, window).first.expand(q.shape[1], -1))

    def has_visible_keys(self, ranges: KeyRanges) -> bool:
        return self.ranges is None or bool(self.ranges.calls(ranges))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        return (self.ranges or self._blocks).attend(q, k, v, ranges)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        return (self.ranges or self._blocks).attend_backward(grad, q, k, v, out, log_sums, ranges)

    def tiles(self, shapes: Mapping[str, Sequence[int]]) -> list[list[Rows]]:
        if self.compiler is not None:
            # Views of all rows: the compiler would make a graph for each size of a parameter itself.
            return [[Rows(name, 0, shape[0], whole=False)] for name, shape in shapes.items() if shape[0]]
        calls: list[list[Rows]] = []
        room = 0
        for rows in row_tiles(shapes, TILE_ENTRIES):
            size = rows.number * math.prod(shapes[rows.name][1:])
            if size > room:
                calls.append([])
                room = TILE_ENTRIES
            calls[-1].append(rows)
            room -= size
        return calls


class CudaDiagnostics(C10dDiagnostics):
    """Memory, peak speed, events and collectives of one GPU.

    Args:
        device: CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def bf16_warning(self) -> str:
        return bf16_warning(torch.cuda.get_device_name(self._device), torch.cuda.get_device_capability(self._device))

    def peak_flops(self, params: str = "bf16") -> float | None:
        peaks = gpu_peaks(torch.cuda.get_device_name(self._device))
        if peaks is None:
            return None
        if params != "fp32":
            return peaks.bf16
        return peaks.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else peaks.fp32

    def event(self) -> DeviceEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_wait(self, note: Callable[[bool], None]) -> None:
        WAIT_CLOCK.note = note

    def peak_memory_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def queued(self) -> Mapping[str, Queued]:
        return nccl_trace.newest(nccl_trace.recorded())

    def recording(self) -> bytes:
        return nccl_trace.recorded()

    def watch_memory(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)

    def dump_memory(self, file: Path) -> bool:
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)
        return True


class CudaBackend(AcceleratorBackend):
    """Backend with one GPU per rank; the local rank is the index of the GPU."""

    name = "cuda"
    compiler = "inductor"
    # NCCL's clock starts when the host enqueues a collective, several steps before the host itself may wait.
    _group_patience_s = 120.0
    kernels: CudaKernels
    _is_deterministic = False

    def __init__(self, settings: BackendSettings = DEFAULTS) -> None:
        self.compiles_at_first_use = settings.torch_compile
        support = self.support()
        if not support.ok:
            raise BackendError(f"backend.name=cuda cannot run here: {support.reason}")
        self._settings, self._pins = ExitStack(), ExitStack()
        self._is_deterministic = settings.deterministic
        if settings.deterministic:
            self._settings.enter_context(deterministic(os.environ))
        self._read_placement()
        gpus = torch.cuda.device_count()
        if self.local_rank >= gpus:
            raise BackendError(
                f"local rank {self.local_rank} has no GPU: this node shows {gpus}; start at most {gpus} ranks per node"
            )
        self.device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(self.device)
        self.kernels, self.host_kernels = CudaKernels(), CpuKernels()
        self.diagnostics = CudaDiagnostics(self.device)
        self.collectives.options = group_options
        # Checkpoint plans are exchanged as host objects, which gloo carries without touching the GPU.
        self._join("cpu:gloo,cuda:nccl", settings.hang_timeout_s, self.device, rejoined=settings.rejoined)

    @staticmethod
    def support() -> Support:
        if torch.version.cuda is None:
            return Support(False, f"torch {torch.__version__} is built without CUDA")
        if not torch.cuda.is_available():
            return Support(False, "torch finds no usable NVIDIA GPU or driver (see nvidia-smi)")
        return Support(True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")

    def choose_attention(self, wanted: str, shape: AttentionShape) -> None:
        self._pins.close()
        self.kernels.ranges = None
        self.kernels.flex = None
        self.kernels.causal = "fused"
        choose = partial(self._choose, wanted)
        self.attention = choose_mixed(choose, shape) if shape.is_mixed else choose(shape)

    def _choose(self, wanted: str, shape: AttentionShape) -> AttentionChoice | None:
        """Choose the attention kernel for layers of one kind, by trials on this GPU."""
        choice = choose_torch(self.name, wanted, shape)
        assert choice is not None, "a GPU announces its kernel"
        if choice.kind == "flex":
            return self._try_flex(wanted, choice, shape, shape.limits)
        if choice.kind == "flash" and shape.limits:
            return self._try_ranges(wanted, choice, shape)
        if not shape.limits and choice.kind in ("plain", "blocked"):
            self.kernels.causal = "plain"
            self._pins.enter_context(sdpa_kernels.pinned("plain"))
        elif choice.kind in sdpa_kernels.BACKENDS or choice.kind == "fused":
            return self._pin(choice, shape)
        return choice

    def _try_ranges(self, wanted: str, choice: AttentionChoice, shape: AttentionShape) -> AttentionChoice:
        """Choose FlashAttention for masked attention if a trial on this GPU succeeds; else FlexAttention or blocks."""
        ranges = FlashRanges(TorchFlash(), self.kernels.copies)
        why = flash_ranges.failure(ranges, self.device, DTYPES[shape.params], shape.head_size)
        if not why:
            self.kernels.ranges = ranges
            return choice
        if wanted == "flash":
            raise BackendError(f"backend.attention=flash: FlashAttention fails here: {why}; use auto")
        why = f"FlashAttention fails here: {why}"
        other = without_flash(shape, why)
        return self._try_flex(wanted, other, shape, [*shape.limits, why]) if other.kind == "flex" else other

    def _try_flex(
        self, wanted: str, choice: AttentionChoice, shape: AttentionShape, reasons: Sequence[str]
    ) -> AttentionChoice:
        """Choose FlexAttention if a trial on this GPU succeeds; else blocked attention, with `reasons` in the note."""
        attend = flex_attention.compiled()
        why = flex_attention.failure(attend, self.device, DTYPES[shape.params], shape.head_size)
        if why:
            if wanted == "flex":
                raise BackendError(f"backend.attention=flex: FlexAttention fails here: {why}; use auto")
            reason = f"{'; '.join(reasons)}; FlexAttention fails here: {why}. {shape.blocks_cost(self.name)}"
            return AttentionChoice("blocked", reason)
        self.kernels.flex = attend
        if not shape.limits:
            self.kernels.causal = "flex"
        return choice

    def _pin(self, choice: AttentionChoice, shape: AttentionShape) -> AttentionChoice:
        """Restrict torch to the configured attention kernel, or to the first kernel whose trial here succeeds."""
        tried: list[str] = []
        kinds: tuple[AttentionKind, ...] = (choice.kind,)
        if choice.kind == "fused":
            capability = torch.cuda.get_device_capability(self.device)
            kinds = sdpa_kernels.order(capability, deterministic=self._is_deterministic)
        for kind in kinds:
            self._pins.enter_context(sdpa_kernels.pinned(kind))
            why = sdpa_kernels.failure(kind, self.device, DTYPES[shape.params], shape.head_size)
            if not why:
                if not sdpa_kernels.takes_groups(kind, DTYPES[shape.params]):
                    self.kernels.causal = "repeated"
                reason = choice.reason if kind == choice.kind else "; ".join([CUDA_KERNELS[kind], *tried])
                return AttentionChoice(kind, reason)
            self._pins.close()
            tried.append(f"{kind} fails here: {why}")
        if choice.kind in ("fused", "efficient"):
            self.kernels.causal = "plain"
            return AttentionChoice("blocked", f"{'; '.join(tried)}. {shape.blocks_cost(self.name)}")
        raise BackendError(f"backend.attention={choice.kind} cannot run on this GPU: {tried[0]}; use auto")

    def choose_float8(self, recipe: str, params: str) -> None:
        if recipe == "none":
            return
        why = float8_products.failure(recipe, self.kernels, self.host_kernels, self.device, DTYPES[params])
        if why:
            others = "tensorwise, which needs less, or " if recipe != "tensorwise" else ""
            raise ConfigError([Problem("precision.fp8", f"{recipe} fails here: {why}", hint=f"use {others}none")])
        self.float8 = f"float8: {recipe}, by torch._scaled_mm"

    def overlap_products(self, tp: Axis) -> None:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(self.collectives.group(tp).group_name)
        self.compiler_options = {"_micro_pipeline_tp": True}

    def close(self) -> None:
        self._pins.close()
        self._settings.close()
        super().close()

    def notes(self) -> tuple[str, ...]:
        if self._is_deterministic:
            return (*super().notes(), "backend.deterministic=true: deterministic kernels, at a cost in time")
        return super().notes()

    def compile_kernels(self) -> None:
        self.kernels.compiler = self.compiler

    def pin(self, memory: Tensor) -> Callable[[], None] | None:
        runtime, address = torch.cuda.cudart(), memory.data_ptr()
        if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) != 0:  # a limit on locked memory, for instance
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)  # clears the error that the next kernel would raise
            return None
        return partial(runtime.cudaHostUnregister, address)

    def put(self, x: Tensor) -> Tensor:
        pinned = x.pin_memory()
        uploaded = pinned.to(self.device, non_blocking=True)
        if x.dtype == torch.int64:  # perhaps first positions of documents
            self.kernels.copies[uploaded] = pinned
        return uploaded
