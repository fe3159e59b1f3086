"""Kernels from torch's operations: fused ones for CPU and CUDA, plain ones that any device can lower."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nxtrain.backends.base import AdamStep, Kernels, Rows
from nxtrain.backends.rounding import RoundingKey, round_by_pairs, round_one_by_one


class FusedKernels(Kernels):
    """torch's own fused kernels, on CPU and CUDA."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def recompute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return recompute(function, *inputs)

    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        how: AdamStep,
    ) -> None:
        torch._fused_adamw_(
            list(params),
            list(grads),
            list(exp_avgs),
            list(exp_avg_sqs),
            [],
            [how.step] * len(params),
            lr=how.lr,
            beta1=how.betas[0],
            beta2=how.betas[1],
            weight_decay=how.weight_decay,
            eps=how.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=self._divisor(how.grad_scale),
            found_inf=None if how.skip is None else how.skip.float(),
        )

    def bits(self, x: Tensor) -> Tensor:
        return x.view(torch.int32)

    def replace(self, x: Tensor, new: Tensor, unless: Tensor) -> None:
        torch.where(unless, x, new.to(x.dtype), out=x)

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        round_by_pairs(x, out, key, step)

    def _divisor(self, grad_scale: Tensor) -> Tensor | None:
        """Divisor of gradients for torch's kernel; None: 1."""
        return grad_scale.reciprocal()


class PlainKernels(Kernels):
    """Elementary operations with every changing number on the device, so that an XLA graph never changes."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def recompute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return recompute(function, *inputs)

    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        how: AdamStep,
    ) -> None:
        beta1, beta2 = how.betas
        correction1, correction2 = bias_correction(beta1, how.step), bias_correction(beta2, how.step).sqrt()
        for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
            scaled = grad * how.grad_scale
            # Not in place: torch-xla checks the shapes of such operations in Python, at thrice the cost to the host.
            mean = exp_avg * beta1 + scaled * (1.0 - beta1)
            mean_sq = exp_avg_sq * beta2 + scaled * scaled * (1.0 - beta2)
            update = (mean / correction1) / (mean_sq.sqrt() / correction2 + how.eps)
            updated = param * (1.0 - how.lr * how.weight_decay) - how.lr * update
            for x, new in ((exp_avg, mean), (exp_avg_sq, mean_sq), (param, updated)):
                x.copy_(new if how.skip is None else torch.where(how.skip, x, new))

    def bits(self, x: Tensor) -> Tensor:
        return x.view(torch.int32)

    def replace(self, x: Tensor, new: Tensor, unless: Tensor) -> None:
        x.copy_(torch.where(unless, x, new.to(x.dtype)))

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        round_one_by_one(x, out, key, step, bitcast=torch.Tensor.view)


def bias_correction(beta: float, step: Tensor) -> Tensor:
    """Sum of the weights of a running mean of decay `beta` after some updates: 1 - beta^step.

    Computed by expm1, since 1 - 0.999 has few digits in float32: the first updates would have errors of 3e-5.

    Args:
        beta: Decay.
        step: () float32, updates done.
    """
    return (step * (math.log(beta) if beta else -math.inf)).expm1().neg()


def row_tiles(shapes: Mapping[str, Sequence[int]], limit: int) -> Iterator[Rows]:
    """Divide parameters by rows into tiles of at most `limit` entries, or of one row; empty parameters give none."""
    for name, (num_rows, *rest) in shapes.items():
        width = max(1, limit // max(1, math.prod(rest)))
        for start in range(0, num_rows, width):
            yield Rows(name, start, min(width, num_rows - start), whole=width >= num_rows)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool = False) -> Tensor:
    """`scaled_dot_product_attention` on (S, B, N, H); `grouped` lets torch repeat the K/V heads."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if repeats > 1 and not grouped:
        k, v = (repeat_heads(x, repeats) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=repeats > 1 and grouped)
    return out.permute(2, 0, 1, 3)


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """(B, K, S, H) to (B, K * repeats, S, H), copies of a head adjacent; the last two dimensions may be any."""
    return x.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)


class _RMSNorm(torch.autograd.Function):
    """RMS norm that saves only its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        rstd = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x32 * rstd * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        grad32 = grad.float()
        weight_grad = (grad32 * normed).flatten(0, -2).sum(dim=0)
        inner = grad32 * weight.float()
        x_grad = (inner - normed * (inner * normed).mean(dim=-1, keepdim=True)) * rstd
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Kernels.rms_norm` in elementary operations."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def recompute(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`Kernels.recompute` by torch, which stops the second call after the last value that backward needs."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
