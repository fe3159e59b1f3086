"""torch's side of `kernels.cpp`: autograd functions, and the kernels of a CPU.

Kernels take contiguous tensors of one type, float32 or bfloat16. Anything else, such as float64, and graphs of
`torch.compile`, which fuse elementary operations themselves, take torch's operations.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_long, c_void_p
from typing import Any

import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cpu_native.build import load
from nxtrain.backends.cpu_products import has_bf16_products, has_products
from nxtrain.common.vocab import VocabColumns

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}

_SIGNATURES: dict[str, tuple[type[Any], ...]] = {
    "nx_rms_norm": (*[c_void_p] * 4, c_long, c_long, c_float, c_int),
    "nx_rms_norm_backward": (*[c_void_p] * 6, c_long, c_long, c_int),
    "nx_swiglu": (*[c_void_p] * 2, c_long, c_long, c_int),
    "nx_swiglu_backward": (*[c_void_p] * 3, c_long, c_long, c_int),
    "nx_rotate": (*[c_void_p] * 4, c_float, c_void_p, *[c_long] * 4, c_int),
    "nx_row_square_sums": (*[c_void_p] * 2, c_long, c_long, c_int),
    "nx_softmax_sums": (*[c_void_p] * 3, *[c_long] * 3, c_int),
    "nx_softmax_grad": (*[c_void_p] * 4, *[c_long] * 3, c_int),
}
_ATTENTION = {
    "nx_attention": (*[c_void_p] * 8, *[c_long] * 5, c_float, c_int),
    "nx_attention_backward": (*[c_void_p] * 13, *[c_long] * 5, c_float, c_int),
}


class NativeKernels(CpuKernels):
    """Kernels in C++ for the forward and backward passes and the norm of the gradient, and torch's for the rest.

    Attributes:
        products: Way in which this CPU computes matrix products of bfloat16.

    Args:
        library: `build.load()`.
    """

    widens_logits = False

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, types in _SIGNATURES.items():
            for suffix in SUFFIX.values():
                _declare(library, f"{name}_{suffix}", types)
        for name, types in _ATTENTION.items():
            _declare(library, name, types)
        self._has_products = has_bf16_products()
        self.products = "by torch" if has_products(torch.bfloat16) else "in float32"
        if self._has_products:
            self.products = "by AMX" if torch.cpu._is_amx_tile_supported() else "by avx512_bf16"

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self._has_products or q.dtype != torch.bfloat16 or not _alike(q, k, v) or q.shape[-1] % 2:
            return super().attention(q, k, v)
        out: Tensor = _NativeAttention.apply(q, k, v)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _runs_here(x, weight):
            return super().rms_norm(x, weight, eps)
        out: Tensor = _NativeRMSNorm.apply(x, weight, eps)
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        if not _runs_here(gate_up):
            return super().swiglu(gate_up)
        out: Tensor = _NativeSwiGLU.apply(gate_up)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not _runs_here(x):
            return super().rotate(x, cos, sin)
        out: Tensor = _NativeRotate.apply(x, cos, sin)
        return out

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, columns: VocabColumns, *, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not _runs_here(logits):
            return super().cross_entropy(logits, targets, columns, needs_grad=needs_grad)
        return _cross_entropy(logits.contiguous(), targets, columns, needs_grad=needs_grad)

    def row_square_sums(self, x: Tensor) -> Tensor:
        if not _runs_here(x):
            return super().row_square_sums(x)
        rows, columns = x.shape
        out = torch.empty(rows)
        _call("nx_row_square_sums", x.dtype, x.contiguous(), out, rows, columns)
        return out


def _declare(library: ctypes.CDLL, name: str, types: tuple[type[Any], ...]) -> None:
    function = getattr(library, name)
    function.argtypes, function.restype = types, None


def _alike(*tensors: Tensor) -> bool:
    """True if all tensors have entries, in host memory, of one type that the kernels know."""
    first = tensors[0].dtype
    return first in SUFFIX and all(x.dtype == first and x.device.type == "cpu" and x.numel() for x in tensors)


def _runs_here(*tensors: Tensor) -> bool:
    return not torch.compiler.is_compiling() and _alike(*tensors)


def _call(name: str, dtype: torch.dtype, *args: Any) -> None:
    """Run a kernel on tensors, given as their addresses, and numbers."""
    values = (x.data_ptr() if isinstance(x, Tensor) else x for x in args)
    getattr(load(), f"{name}_{SUFFIX[dtype]}")(*values, torch.get_num_threads())


class _NativeRMSNorm(torch.autograd.Function):
    """RMS norm that saves only its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        size = weight.numel()
        rows = x.numel() // size
        out, rstd = torch.empty_like(x), torch.empty(rows)
        _call("nx_rms_norm", x.dtype, x, weight, out, rstd, rows, size, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        grad = grad.contiguous()
        x_grad, weight_grad = torch.empty_like(x), torch.empty(weight.numel())
        shape = rstd.numel(), weight.numel()
        _call("nx_rms_norm_backward", x.dtype, grad, x, weight, rstd, x_grad, weight_grad, *shape)
        return x_grad, weight_grad.to(weight.dtype), None


class _NativeSwiGLU(torch.autograd.Function):
    """silu(gate) * up of a concatenated input; saves only the input and computes the unit again in backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        _call("nx_swiglu", gate_up.dtype, gate_up, out, out.numel() // size, size)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad, out = grad.contiguous(), torch.empty_like(gate_up)
        size = grad.shape[-1]
        _call("nx_swiglu_backward", gate_up.dtype, gate_up, grad, out, grad.numel() // size, size)
        return out


class _NativeRotate(torch.autograd.Function):
    """Rotation whose backward is the inverse rotation, so that only the tables are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = _with_rows(x)
    out = x.new_empty(x.shape)
    length, batch, heads, width = x.shape
    _call("nx_rotate", x.dtype, x, _strides(x), cos, sin, sign, out, length, batch, heads, width // 2)
    return out


def _with_rows(x: Tensor) -> Tensor:
    """Tensor whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor) -> Any:
    return (c_long * 3)(*x.stride()[:3])


def _cross_entropy(
    logits: Tensor, targets: Tensor, columns: VocabColumns, *, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """`Kernels.cross_entropy`; the gradient overwrites the logits."""
    (rows, width), dtype, comm, axis = logits.shape, logits.dtype, columns.comm, columns.axis
    used = width if columns.padding is None else int(columns.padding.isfinite().sum())
    counted, here, column = columns.place(targets)
    peaks, sums = torch.empty(rows), torch.empty(rows)
    _call("nx_softmax_sums", dtype, logits, peaks, sums, rows, width, used)
    peak = comm.all_reduce(peaks.clone(), axis, "max")
    target_score = torch.where(here, logits.gather(1, column).squeeze(1).float(), 0.0)
    totals = comm.all_reduce(torch.stack([sums * (peaks - peak).exp(), target_score]), axis)
    log_sums = totals[0].log() + peak
    loss = torch.where(counted, log_sums - totals[1], 0.0).sum()
    if not needs_grad:
        return loss, None
    place = torch.where(here, column.squeeze(1), -1)
    _call("nx_softmax_grad", dtype, logits, log_sums, place, counted.float(), rows, width, used)
    return loss, logits


class _NativeAttention(torch.autograd.Function):
    """Causal attention in bfloat16 that saves its inputs, its output and one number per row of scores.

    Source: Dao 2023 (arXiv:2307.08691) for the backward pass from the rows' log sums.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, log_sums = torch.ops.nxtrain.attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.nxtrain.attention_backward(grad, *ctx.saved_tensors)  # type: ignore[no-any-return]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = map(_with_rows, (q, k, v))
    out, log_sums = _attention_outputs(q, k, v)
    load().nx_attention(
        *(part for x in (q, k, v) for part in (x.data_ptr(), _strides(x))),
        out.data_ptr(),
        log_sums.data_ptr(),
        *_attention_shape(q, k),
    )
    return out, log_sums


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v = map(_with_rows, (grad, q, k, v))
    grads = _attention_grads(grad, q, k, v, out, log_sums)
    load().nx_attention_backward(
        *(part for x in (grad, q, k, v) for part in (x.data_ptr(), _strides(x))),
        *(x.data_ptr() for x in (out, log_sums, *grads)),
        *_attention_shape(q, k),
    )
    return grads


def _attention_shape(q: Tensor, k: Tensor) -> tuple[Any, ...]:
    length, batch, heads, width = q.shape
    return length, batch, heads, k.shape[2], width, 1.0 / math.sqrt(width), torch.get_num_threads()


def _attention_outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    length, batch, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=torch.float32)


def _attention_grads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _register() -> None:
    """Register attention as operations of torch, so that `torch.compile` keeps them in its graphs."""
    if hasattr(torch.ops.nxtrain, "attention"):
        return
    saved = "Tensor q, Tensor k, Tensor v"
    torch.library.define("nxtrain::attention", f"({saved}) -> (Tensor, Tensor)")
    arguments = f"Tensor grad, {saved}, Tensor out, Tensor log_sums"
    torch.library.define("nxtrain::attention_backward", f"({arguments}) -> (Tensor, Tensor, Tensor)")
    torch.library.impl("nxtrain::attention", "CPU", _attention)
    torch.library.impl("nxtrain::attention_backward", "CPU", _attention_backward)
    torch.library.register_fake("nxtrain::attention", _attention_outputs)
    torch.library.register_fake("nxtrain::attention_backward", _attention_grads)


_register()
