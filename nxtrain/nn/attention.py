"""Causal self-attention with grouped queries.

Shapes: S sequence, B batch, D hidden, N query heads, K key/value heads, H head dimension; N, K of this rank.
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
    """Causal attention core without parameters, a module of its own so that recomputation can wrap it.

    Args:
        kernels: Kernels of the device.
        context_parallel: Ranks that share the positions of a sequence; None: this rank has all positions.

    Attributes:
        window: Most positions that a query sees, its own among them; None: no limit.
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
        """(S, B, N, H), (S, B, K, H), (S, B, K, H) to (S, B, N, H); S are the positions of this rank.

        Args:
            q, k, v: Queries, keys and values.
            starts: (B, S) first position of each position's document; None: a row is one document.
            positions: (S,) positions of this rank under context parallelism.
            sinks: (N,) score of each head without a key; None: none.
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
    """Heads of a block's attention.

    Args:
        num, num_kv: Numbers of query heads, and of K/V heads, over all ranks.
        width: H.
        bias: The projections to queries, keys and values have biases.
        norm_eps: Every head of the queries and keys is normalized before its rotation, with this added to the mean
            square; None: no head is.
        window: Most positions that a query sees, its own among them; None: no limit.
        out_bias: The projection back has a bias.
        sinks: Each query head has a score without a key in its softmax.
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
    """Projections, norms of heads if the model has them, rotation, causal attention and the projection back.

    K/V heads are sharded over tp like query heads; when tp exceeds their number, adjacent ranks hold the same head.

    Args:
        hidden_size: D.
        heads: The heads.
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
        """(S/tp, B, D) to (S/tp, B, D).

        Args:
            x: Activations.
            rope: Rotary tables.
            starts: (B, S) first position of each position's document; None: a row is one document.
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
