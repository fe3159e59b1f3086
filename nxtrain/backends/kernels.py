"""Kernels from torch itself: fused ones where torch has them, plain ones that any device can lower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.base import Kernels


class FusedKernels(Kernels):
    """torch's own fused kernels, on CPU and CUDA.

    Args:
        one_by_one: Update one parameter per call.
        grouped_attention: The device's flash attention takes fewer K/V heads than query heads. On CPU (torch 2.9) it
            does not, and asking for it falls back to full score matrices.
    """

    def __init__(self, *, one_by_one: bool, grouped_attention: bool) -> None:
        self._one_by_one, self._grouped_attention = one_by_one, grouped_attention

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(q, k, v, grouped=self._grouped_attention)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def batches(self, names: list[str]) -> list[list[str]]:
        # A CPU starts kernels for nothing, and what is cast for one parameter is still in its cache for the update.
        return [[name] for name in names] if self._one_by_one else super().batches(names)

    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        lr: Tensor,
        step: Tensor,
        grad_scale: Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        torch._fused_adamw_(
            list(params),
            list(grads),
            list(exp_avgs),
            list(exp_avg_sqs),
            [],
            [step] * len(params),
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale.reciprocal(),
        )


class PlainKernels(Kernels):
    """Elementary operations with every changing number on the device, so that an XLA graph never changes."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(q, k, v)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        lr: Tensor,
        step: Tensor,
        grad_scale: Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        beta1, beta2 = betas
        correction1 = 1.0 - torch.pow(beta1, step)
        correction2 = (1.0 - torch.pow(beta2, step)).sqrt()
        for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
            scaled = grad * grad_scale.to(grad.dtype)
            exp_avg.mul_(beta1).add_(scaled * (1.0 - beta1))
            exp_avg_sq.mul_(beta2).add_(scaled * scaled * (1.0 - beta2))
            update = (exp_avg / correction1) / (exp_avg_sq.sqrt() / correction2 + eps)
            param.copy_(param * (1.0 - lr * weight_decay) - lr * update)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool = False) -> Tensor:
    """`scaled_dot_product_attention` on (S, B, N, H); `grouped` leaves the repetition of K/V heads to it."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if repeats > 1 and not grouped:
        k, v = (_repeat_heads(x, repeats) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=repeats > 1 and grouped)
    return out.permute(2, 0, 1, 3)


def _repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """(B, K, S, H) to (B, K * repeats, S, H), each head beside its copies."""
    return x.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)


class _RMSNorm(torch.autograd.Function):
    """Keeps only its input and one number per row."""

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
