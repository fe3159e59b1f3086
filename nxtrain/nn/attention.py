"""Causal self-attention with grouped queries, tensor parallel heads and optional context parallelism.

Shapes: S sequence, B batch, D hidden, N query heads, K key/value heads, H head dimension; N and K are of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nxtrain.common.dimensions import qkv_segments
from nxtrain.common.kernels import Kernels
from nxtrain.common.sharding import Init, ShardSpec
from nxtrain.nn.norm import RMSNorm
from nxtrain.nn.rope import Rope, positions_of

if TYPE_CHECKING:
    from nxtrain.common.family import BuildContext
    from nxtrain.common.layers import ContextAttention


class CausalAttention(nn.Module):
    """Causal attention without parameters, as a separate module that activation checkpointing can wrap.

    Args:
        kernels: Kernels of the device.
        context_parallel: Attention over the ranks that share the positions of a sequence; None if this rank has all
            positions.

    Attributes:
        window: Sliding window in positions, the query's own included; None without a window.
    """

    def __init__(
        self, kernels: Kernels, context_parallel: ContextAttention | None = None, window: int | None = None
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self._context_parallel = context_parallel
        self.window = window

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None = None,
        positions: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of this rank's S positions: q (S, B, N, H), k and v (S, B, K, H) to (S, B, N, H).

        Args:
            q, k, v: Queries, keys and values.
            starts: (B, S) first position of each position's document; None if each row is one document.
            positions: (S,) positions of this rank under context parallelism.
            sinks: (N,) attention sink score of each head; None without sinks.
        """
        if self._context_parallel is not None:
            assert positions is not None, "a rank of several knows its positions"
            return self._context_parallel.attention(q, k, v, positions, starts, self.window)
        has_window = self.window is not None and self.window < q.shape[0]
        if sinks is not None:
            return self._kernels.sink_attention(q, k, v, sinks, starts, self.window if has_window else None)
        if has_window:
            return self._kernels.document_attention(q, k, v, starts, self.window)
        if starts is not None:
            return self._kernels.document_attention(q, k, v, starts)
        return self._kernels.attention(q, k, v)


@dataclass(frozen=True)
class Heads:
    """Settings of the attention heads of a block.

    Args:
        num, num_kv: Number of query heads, and of K/V heads, over all ranks.
        width: Head dimension H.
        bias: The query, key and value projections have biases.
        norm_eps: Epsilon of the RMS norms of query and key heads, before their rotation; None without such norms.
        window: Sliding window in positions, the query's own included; None without a window.
        out_bias: The output projection has a bias.
        sinks: Each query head has an attention sink, a learned score without a key in its softmax.
    """

    num: int
    num_kv: int
    width: int
    bias: bool = False
    norm_eps: float | None = None
    window: int | None = None
    out_bias: bool = False
    sinks: bool = False


class Attention(nn.Module):
    """Attention layer: projections, optional norms of heads, rotary embedding, causal attention and output projection.

    K/V heads are sharded over tp like query heads. If tp exceeds their number, adjacent ranks hold the same head.

    Args:
        hidden_size: Hidden size D.
        heads: Settings of the heads.
        init, init_out: Initial values of the input and output projections.
        context: Layers and kernels of the model.

    Source: Henry et al. 2020 (arXiv:2010.04245) for norms of heads.
    """

    def __init__(self, hidden_size: int, heads: Heads, *, init: Init, init_out: Init, context: BuildContext) -> None:
        super().__init__()
        layers, width = context.layers, heads.width
        segments = qkv_segments(heads.num, heads.num_kv, width, layers.tp.size)
        self._fused = context.fused_qkv
        self._norms_heads = heads.norm_eps is not None
        self._head_dim = width
        self._num_heads = heads.num // layers.tp.size
        self._num_kv_heads = max(1, heads.num_kv // layers.tp.size)
        if self._fused:
            self.qkv_proj = layers.column(hidden_size, segments, init, bias=heads.bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                layers.column(hidden_size, (s,), init, bias=heads.bias) for s in segments
            )
        if heads.norm_eps is not None:
            # A rank sees its own heads only, and of a K/V head that adjacent ranks hold, its own queries only.
            norm = partial(RMSNorm, width, heads.norm_eps, kernels=context.kernels, partial_gradient=True)
            self.q_norm = norm(dtype=context.dtype, decay=context.decay_norms)
            self.k_norm = norm(dtype=context.dtype, decay=context.decay_norms)
        self.core = CausalAttention(context.kernels, context.context_parallel, heads.window)
        self.o_proj = layers.row(heads.num * width, hidden_size, init_out, bias=heads.out_bias)
        self.sinks: nn.Parameter | None = None
        if heads.sinks:
            spec = ShardSpec((heads.num,), dim=0, decay=False, init=init)
            self.specs = {"sinks": spec}
            self.sinks = nn.Parameter(torch.empty(spec.local_shape(layers.tp), dtype=context.dtype))

    def forward(self, x: Tensor, rope: Rope, starts: Tensor | None = None) -> Tensor:
        """Apply the attention layer: (S/tp, B, D) to (S/tp, B, D).

        Args:
            x: Activations.
            rope: Tables of the rotary embedding.
            starts: (B, S) first position of each position's document; None if each row is one document.
        """
        turn: Callable[[Tensor], Tensor] = rope
        if starts is not None:
            turn = partial(rope, positions=positions_of(starts, rope.positions))
        heads = (self._num_heads, self._num_kv_heads, self._num_kv_heads)
        if self._fused:
            qkv = self.qkv_proj(x).unflatten(-1, (-1, self._head_dim))
            qk, v = qkv.split((heads[0] + heads[1], heads[2]), dim=2)
            # Queries and keys without norms between are rotated together, in one pass.
            q, k = (qk if self._norms_heads else turn(qk)).split(heads[:2], dim=2)
        else:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (project(x).unflatten(-1, (-1, self._head_dim)) for project in projections)
        if self._norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if self._norms_heads or not self._fused:
            q, k = turn(q), turn(k)
        ranges: tuple[Tensor | None, ...] = ()
        if rope.positions is not None:
            ranges = (starts, rope.positions)
        elif starts is not None:
            ranges = (starts,)
        if self.sinks is not None:
            ranges = (starts, rope.positions, self.sinks)
        return self.o_proj(self.core(q, k, v, *ranges).flatten(2))  # type: ignore[no-any-return]
