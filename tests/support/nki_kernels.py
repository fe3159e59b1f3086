"""Plain operations in the place of the NKI kernels of flash attention, with their signatures, layouts and conditions.

Only what is compiled for the device is replaced: `flash_fwd`, `flash_attn_bwd`, their `FlashConfig` and the cores of a
launch grid. Arithmetic is in float64 and rounds to the type of each result, once. So this shows nothing of the kernels'
own precision, whose products are bfloat16.

Shapes: B batch, N heads, H head dimension, S sequence, P partitions of 128.

Source: src/nki_samples/reference/attention.py in https://github.com/aws-neuron/nki-samples at 0898a77.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

PARTITIONS = 128
TILE = 2048
MAX_HEAD = 128
MASKED = -1e30


@dataclass(frozen=True)
class FlashConfig:
    seq_tile_size: int = TILE
    attn_core_tile_size: int = 256
    training: bool = True
    should_transpose_v: bool = False
    lse_dtype: str = ""


@dataclass(frozen=True)
class Cores:
    """Physical cores of a launch grid, times the programs of each."""

    number: int
    programs: int = 1

    def __mul__(self, programs: int) -> Cores:
        return Cores(self.number, self.programs * programs)

    @property
    def total(self) -> int:
        return self.number * self.programs


@dataclass
class Launches:
    compute: Callable[..., Any]
    grids: list[tuple[int, int, int]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, int | Cores]) -> Callable[..., Any]:
        batch, heads = grid
        cores = heads if isinstance(heads, Cores) else Cores(1, heads)

        def launch(q: Tensor, *args: Any, **options: Any) -> Any:
            assert (batch, cores.total) == tuple(q.shape[:2]), "a program for each head of each sequence"
            self.grids.append((batch, cores.total, cores.number))
            return self.compute(q, *args, **options)

        return launch


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | None,
    logit_bias: None = None,
    softmax_scale: float | None = None,
    use_causal_mask: bool = True,
    sliding_window: int = -1,
    mixed_precision: bool = True,
    dropout_p: float = 0.0,
    config: FlashConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, N, H, S) three times, or `v` as (B, N, S, H), to (B, N, S, H) and the sums' logarithms, (B, N, P, S / P)."""
    config = config or FlashConfig()
    batch, heads, size, length = q.shape
    assert tuple(k.shape) == (batch, heads, size, length)
    assert tuple(v.shape) == (
        (batch, heads, size, length) if config.should_transpose_v else (batch, heads, length, size)
    )
    assert q.dtype == k.dtype == v.dtype
    assert size <= MAX_HEAD
    assert length % config.seq_tile_size == 0
    assert (seed, logit_bias, sliding_window, dropout_p) == (None, None, -1, 0.0)
    values = v.transpose(2, 3) if config.should_transpose_v else v
    scores = _scores(q, k, softmax_scale, use_causal_mask)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ values.double()
    sums = torch.float32 if mixed_precision else q.dtype
    kept = getattr(torch, config.lse_dtype) if config.lse_dtype else sums
    return out.to(q.dtype), lse.unflatten(2, (-1, PARTITIONS)).transpose(2, 3).to(kept)


def _backward(
    q_ref: Tensor,
    k_ref: Tensor,
    v_ref: Tensor,
    o_ref: Tensor,
    dy_ref: Tensor,
    lse_ref: Tensor,
    seed_ref: Tensor | None,
    logit_bias_ref: None = None,
    use_causal_mask: bool = False,
    mixed_precision: bool = False,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    sliding_window: int = -1,
    sinks: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Five of (B, N, H, S), and the sums' logarithms, to the gradients of the first three."""
    assert q_ref.dtype == k_ref.dtype == v_ref.dtype == o_ref.dtype == dy_ref.dtype
    assert q_ref.shape == k_ref.shape == v_ref.shape == o_ref.shape == dy_ref.shape
    batch, heads, size, length = q_ref.shape
    assert tuple(lse_ref.shape) == (batch, heads, PARTITIONS, length // PARTITIONS)
    assert (seed_ref, logit_bias_ref, sliding_window, sinks, dropout_p) == (None, None, -1, None, 0.0)
    scale = softmax_scale or size**-0.5
    q, k, v, o, dy = (x.double() for x in (q_ref, k_ref, v_ref, o_ref, dy_ref))
    lse = lse_ref.double().transpose(2, 3).flatten(2)
    weights = torch.exp(_scores(q, k, softmax_scale, use_causal_mask) - lse.unsqueeze(-1))
    inner = dy.transpose(2, 3) @ v - (dy * o).sum(dim=2).unsqueeze(-1)
    grad = weights * inner * scale
    return (
        (k @ grad.transpose(2, 3)).to(q_ref.dtype),
        (q @ grad).to(q_ref.dtype),
        (dy @ weights).to(q_ref.dtype),
    )


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool) -> Tensor:
    scores = q.double().transpose(2, 3) @ k.double() * (scale or q.shape[2] ** -0.5)
    if not causal:
        return scores
    at = torch.arange(q.shape[3], device=q.device)
    return torch.where(at.unsqueeze(1) >= at, scores, MASKED)


flash_fwd = Launches(_forward)
flash_attn_bwd = Launches(_backward)


def install() -> None:
    """Put them where NeuronX Distributed finds the true ones; after `nxd_cpu.prepare`."""
    replaced: dict[str, dict[str, Any]] = {
        "neuronxcc.nki.kernels": {"flash_fwd": flash_fwd, "flash_attn_bwd": flash_attn_bwd},
        "neuronxcc.nki.kernels.attention": {"FlashConfig": FlashConfig},
        "neuronxcc.nki.language": {"nc": Cores},
    }
    for module, names in replaced.items():
        vars(import_module(module)).update(names)
    wrapper = sys.modules.get("neuronx_distributed.kernels.flash_attn")
    if wrapper is not None:
        vars(wrapper)["FlashConfig"] = FlashConfig
