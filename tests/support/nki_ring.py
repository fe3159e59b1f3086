"""Plain operations in place of the NKI Library's ring attention, with its signatures, layouts and conditions.

Ranks exchange what they have by gloo, where the kernels pass it on. Arithmetic is in float64 and rounds to the type of
each result, once. So this shows nothing of the kernels' own precision, whose products are bfloat16.

Shapes: B sequences, N heads, T positions of a rank, D head dimension, P partitions of 128.

Source: src/nkilib_src/nkilib/experimental/attention/ring_attention_fwd.py in https://github.com/aws-neuron/nki-library
at 092a49d, and ring_attention_bwd.py of the same time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.nki_bounded import MASKED, PARTITIONS, Launches

Groups = tuple[tuple[int, ...], ...]


def _of_ring(x: Tensor, groups: Groups) -> tuple[list[Tensor], int]:
    """Tensors of the ranks of this rank's ring in order, and its place there."""
    ring = next(group for group in groups if dist.get_rank() in group)
    of_all = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, x.contiguous())
    return [of_all[rank] for rank in ring], ring.index(dist.get_rank())


def _places(length: int, size: int, striped: bool) -> list[Tensor]:
    """Positions of each rank."""
    of_all = torch.arange(size * length)
    return [of_all[rank::size] if striped else of_all[rank * length : (rank + 1) * length] for rank in range(size)]


def _whole(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Parts of all ranks, (B, N, T, D) each, in the order of positions."""
    return torch.cat(list(parts), dim=2)[:, :, torch.cat(list(places)).argsort()]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    replica_groups: Groups = (),
    num_workers: int = 1,
    softmax_scale: float | None = None,
    use_causal_mask: bool = False,
    striped_input: bool = False,
    training: bool = False,
    lse_dtype: torch.dtype = torch.float32,
    tp_q: bool = False,
    tp_k: bool = False,
    bound_min: None = None,
    bound_max: None = None,
) -> tuple[Tensor, Tensor]:
    """Three of (B, N, T, D) to the same, and logarithms of sums, (B, N, P, T / P)."""
    assert (use_causal_mask, training, tp_q, tp_k) == (True, True, True, True)
    assert (bound_min, bound_max) == (None, None)
    assert softmax_scale == 1.0, "attention_cte requires scale=1.0 in CP mode"
    assert q.shape == k.shape == v.shape, "expects q_heads == kv_heads"
    assert q.shape[3] <= 128
    assert q.shape[2] % PARTITIONS == 0
    assert {len(group) for group in replica_groups} == {num_workers}
    length = q.shape[2]
    places = _places(length, num_workers, striped_input)
    (keys, me), (values, _) = _of_ring(k, replica_groups), _of_ring(v, replica_groups)
    keys_in_order, values_in_order = (_whole(x, places).double() for x in (keys, values))
    scores = q.double() @ keys_in_order.transpose(2, 3)
    seen = torch.arange(num_workers * length) <= places[me].unsqueeze(1)
    scores = scores.masked_fill(~seen, MASKED)
    log_sums = scores.logsumexp(dim=3)
    out = (scores - log_sums.unsqueeze(3)).exp() @ values_in_order
    return out.to(q.dtype), log_sums.unflatten(2, (-1, PARTITIONS)).transpose(2, 3).to(lse_dtype)


def _backward(
    q_ref: Tensor,
    k_ref: Tensor,
    v_ref: Tensor,
    o_ref: Tensor,
    dy_ref: Tensor,
    lse_ref: Tensor,
    use_causal_mask: bool = False,
    mixed_precision: bool = True,
    softmax_scale: float | None = None,
    num_workers: int = 1,
    lnc_size: int = 1,
    replica_groups: Groups = (),
    striped_attention: bool = False,
    bound_min: None = None,
    bound_max: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Five of (B, N, D, T), and the sums' logarithms, to the gradients of the first three in float32."""
    assert (use_causal_mask, mixed_precision, bound_min, bound_max) == (True, True, None, None)
    assert q_ref.dtype == k_ref.dtype == v_ref.dtype == o_ref.dtype == dy_ref.dtype
    assert q_ref.shape == k_ref.shape == v_ref.shape == o_ref.shape == dy_ref.shape
    batch, heads, size, length = q_ref.shape
    assert length % PARTITIONS == 0
    assert lse_ref.dtype == torch.float32
    assert tuple(lse_ref.shape) == (batch, heads, PARTITIONS, length // PARTITIONS)
    scale = softmax_scale or size**-0.5
    places = _places(length, num_workers, striped_attention)
    of_tokens = [x.transpose(2, 3) for x in (q_ref, k_ref, v_ref, o_ref, dy_ref)]
    of_tokens.append(lse_ref.transpose(2, 3).reshape(batch, heads, length, 1))
    gathered = [_of_ring(x, replica_groups) for x in of_tokens]
    me = gathered[0][1]
    q, k, v, o, dy, lse = (_whole(parts, places).double() for parts, _ in gathered)
    seen = torch.arange(num_workers * length) <= torch.arange(num_workers * length).unsqueeze(1)
    weights = (q @ k.transpose(2, 3) * scale - lse).exp() * seen
    inner = dy @ v.transpose(2, 3) - (dy * o).sum(dim=3, keepdim=True)
    grad = weights * inner * scale
    grads = grad @ k, grad.transpose(2, 3) @ q, weights.transpose(2, 3) @ dy
    q_grad, k_grad, v_grad = (x[:, :, places[me]].transpose(2, 3).float().contiguous() for x in grads)
    return q_grad, k_grad, v_grad


ring_attention_spmd_fwd = Launches(_forward)
ring_attention_spmd_bwd = Launches(_backward)


def modules() -> dict[str, ModuleType]:
    """Modules of the NKI Library with the stand-ins, by name."""
    found = {}
    for name in ("nkilib", "nkilib.experimental", "nkilib.experimental.attention"):
        found[name] = ModuleType(name)
    for way, kernel in (("fwd", ring_attention_spmd_fwd), ("bwd", ring_attention_spmd_bwd)):
        module = ModuleType(f"nkilib.experimental.attention.ring_attention_{way}")
        setattr(module, f"ring_attention_spmd_{way}", kernel)
        found[module.__name__] = module
    return found


def install() -> None:
    """Put the stand-ins where the true kernels are found, in a process of its own."""
    sys.modules.update(modules())
