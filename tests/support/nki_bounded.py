"""Plain operations in place of the NKI Library's attention with bounds, with its signatures, layouts and conditions.

Arithmetic is in float64 and rounds to the type of each result, once. So this shows nothing of the kernels' own
precision, whose products are bfloat16.

Shapes: B query heads of sequences, G key/value heads, S sequence, D head dimension, P partitions of 128.

With bounds of each sequence, SDK 2.33, a backward call has several sequences.

Source: src/nkilib_src/nkilib/core/attention/attention_cte.py and attention_bwd.py in
https://github.com/aws-neuron/nki-library at d2ad3a5, its tag 2.29.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

PARTITIONS = 128
KEY_TILE = 512
LONGEST = 131072
MASKED = -3.4028235e38


@dataclass
class Launches:
    """A kernel, called on one core or as `kernel[cores]`."""

    compute: Callable[..., Any]
    cores: list[int] = field(default_factory=list)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.cores.append(1)
        return self.compute(*args, **options)

    def __getitem__(self, cores: int) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            self.cores.append(cores)
            return self.compute(*args, **options)

        return launch


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float = 1.0,
    causal_mask: bool = True,
    k_prior: None = None,
    v_prior: None = None,
    prior_used_len: None = None,
    sink: None = None,
    sliding_window: None = None,
    tp_q: bool = True,
    tp_k: bool = False,
    tp_out: bool = False,
    cache_softmax: bool = False,
    softmax_dtype: torch.dtype = torch.float32,
    mm_out_dtype: torch.dtype = torch.float32,
    cp_offset: None = None,
    global_cp_deg: None = None,
    cp_strided_q_slicing: bool = False,
    bound_min: Tensor | None = None,
    bound_max: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, D), (G, D, S), (G, S, D) to (B, S, D), and negated peaks and inverse sums, (B, P, S / P) each."""
    assert (k_prior, v_prior, prior_used_len, sink, sliding_window) == (None, None, None, None, None)
    assert (cp_offset, global_cp_deg, cp_strided_q_slicing) == (None, None, False)
    assert (tp_q, tp_k, tp_out, causal_mask, cache_softmax) == (True, False, False, True, True)
    heads, length, size = q.shape
    groups = k.shape[0]
    assert tuple(k.shape) == (groups, size, length)
    assert tuple(v.shape) == (groups, length, size)
    assert heads % groups == 0
    assert 0 < heads <= 512
    assert 0 < size <= 128
    assert length <= LONGEST
    assert length % PARTITIONS == 0, "cache_softmax"
    assert scale == 1.0, "range_select path doesn't support scale != 1.0"
    assert bound_min is not None
    assert bound_max is not None
    assert bound_min.is_contiguous()
    assert bound_max.is_contiguous()
    # One row of bounds in SDK 2.29; in 2.33 one for each query head of each sequence.
    assert tuple(bound_min.shape) == tuple(bound_max.shape)
    assert tuple(bound_min.shape) in ((length, 1), (heads, length, 1))
    keys, values = (x.double().repeat_interleave(heads // groups, dim=0) for x in (k, v))
    scores = q.double() @ keys
    at = torch.arange(length, device=q.device)
    # Of causal attention the upper bound is min(query, bound_max), and is included.
    last = torch.minimum(at.unsqueeze(1), bound_max.double())
    seen = (at >= bound_min.double()) & (at <= last)
    scores = torch.where(seen, scores, MASKED)
    peak = scores.amax(dim=2)
    weights = torch.exp(scores - peak.unsqueeze(2))
    total = weights.sum(dim=2)
    out = weights @ values / total.unsqueeze(2)
    tiles = [x.unflatten(1, (-1, PARTITIONS)).transpose(1, 2).to(softmax_dtype) for x in (-peak, 1.0 / total)]
    return out.to(q.dtype), tiles[0], tiles[1]


def _backward(
    q_ref: Tensor,
    k_ref: Tensor,
    v_ref: Tensor,
    o_ref: Tensor,
    dy_ref: Tensor,
    lse_ref: Tensor,
    sinks_ref: None = None,
    bound_min: Tensor | None = None,
    bound_max: Tensor | None = None,
    use_causal_mask: bool = False,
    mixed_precision: bool = False,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Five of (1, B or G, D, S), and the sums' logarithms, to the gradients of the first three."""
    assert (sinks_ref, sliding_window, use_causal_mask) == (None, None, True)
    batch, heads, size, length = q_ref.shape
    groups = k_ref.shape[1]
    assert heads % groups == 0
    assert tuple(k_ref.shape) == tuple(v_ref.shape) == (batch, groups, size, length)
    assert tuple(o_ref.shape) == tuple(dy_ref.shape) == tuple(q_ref.shape)
    assert tuple(lse_ref.shape) == (batch, heads, PARTITIONS, length // PARTITIONS)
    assert q_ref.dtype == k_ref.dtype == v_ref.dtype == o_ref.dtype == dy_ref.dtype
    assert length % min(KEY_TILE, length) == 0
    assert length % PARTITIONS == 0
    assert bound_min is not None
    assert bound_max is not None
    assert bound_min.is_contiguous()
    assert bound_max.is_contiguous()
    assert tuple(bound_min.shape) == tuple(bound_max.shape)
    if bound_min.ndim == 1:  # SDK 2.29
        assert batch == 1
        assert bound_min.shape == (length,)
        bound_min, bound_max = bound_min.unsqueeze(0), bound_max.unsqueeze(0)
    assert tuple(bound_min.shape) == (batch, length)
    assert bound_min.dtype == bound_max.dtype == torch.float32
    scale = softmax_scale or size**-0.5
    repeats = heads // groups
    q, o, dy = (x.double() for x in (q_ref, o_ref, dy_ref))
    k, v = (x.double().repeat_interleave(repeats, dim=1) for x in (k_ref, v_ref))
    at = torch.arange(length, device=q.device)
    end = torch.minimum(bound_max.double(), at + 1).unsqueeze(-1)
    seen = ((at >= bound_min.double().unsqueeze(-1)) & (at < end)).unsqueeze(1)  # of all heads
    lse = lse_ref.double().transpose(2, 3).flatten(2)
    scores = torch.where(seen, q.transpose(2, 3) @ k * scale, MASKED)
    weights = torch.exp(scores - lse.unsqueeze(3))
    inner = dy.transpose(2, 3) @ v - (dy * o).sum(dim=2).unsqueeze(3)
    grad = weights * inner * scale
    k_grad, v_grad = (x.unflatten(1, (groups, repeats)).sum(dim=2) for x in (q @ grad, dy @ weights))
    return tuple(x.to(q_ref.dtype) for x in (k @ grad.transpose(2, 3), k_grad, v_grad))  # type: ignore[return-value]


attention_cte = Launches(_forward)
attention_bwd = Launches(_backward)


def modules() -> dict[str, ModuleType]:
    """Modules of the NKI Library with the stand-ins, by name."""
    found = {}
    for name in ("nkilib", "nkilib.core", "nkilib.core.attention"):
        found[name] = ModuleType(name)
    for name, kernel in (("attention_cte", attention_cte), ("attention_bwd", attention_bwd)):
        module = ModuleType(f"nkilib.core.attention.{name}")
        setattr(module, name, kernel)
        found[module.__name__] = module
    return found


def nki_op(name: str, mutates_args: Any = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Operation of torch, whose function also serves tensors without values, as TorchNeuron's `nki_op` registers it."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        operation = torch.library.custom_op(name, function, mutates_args=tuple(mutates_args))
        operation.register_fake(function)
        return operation

    return register


def install() -> None:
    """Put the stand-ins where the true kernels are found, in a process of its own."""
    sys.modules.update(modules())
