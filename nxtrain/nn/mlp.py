"""Gated feed-forward (SwiGLU) of a transformer block.

Shapes: S sequence, B batch, D hidden, F intermediate size of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.common.dimensions import gate_up_segments
from nxtrain.common.sharding import Init
from nxtrain.parallel.chunks import in_chunks
from nxtrain.parallel.linear import ColumnLinear, RowLinear, SplitBackward

if TYPE_CHECKING:
    from nxtrain.common.family import BuildContext


class GatedMLP(nn.Module):
    """Gated feed-forward down(silu(gate(x)) * up(x)), tensor parallel.

    If tp does not divide the intermediate size, the size is padded. Padded columns are zero in all matrices, stay zero,
    and contribute nothing.

    Args:
        hidden_size: Hidden size D.
        intermediate_size: Intermediate size over all ranks.
        init, init_out: Initial values of the input and output projections.
        context: Layers and kernels of the model.

    Source: Shazeer 2020 (arXiv:2002.05202).
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, init: Init, init_out: Init, context: BuildContext
    ) -> None:
        super().__init__()
        layers = context.layers
        segments = gate_up_segments(intermediate_size)
        self._fused, self._kernels = context.fused_gate_up, context.kernels
        if self._fused:
            self.gate_up_proj = layers.column(hidden_size, segments, init)
        else:
            self.gate_proj, self.up_proj = (layers.column(hidden_size, (s,), init) for s in segments)
        self.down_proj = layers.row(intermediate_size, hidden_size, init_out)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward: (S/tp, B, D) to (S/tp, B, D)."""
        if self._fused:
            hidden = self._kernels.swiglu(self.gate_up_proj(x))
        else:
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden)  # type: ignore[no-any-return]

    def num_chunks(self, x: Tensor, longest: int) -> int:
        """Number of chunks of a limited number of positions; 1 if the layers do not support chunks.

        Layers of another library do not support chunks. Neither do layers that postpone weight gradients, since they
        keep all activations.
        """
        for layer in (*self._columns, self.down_proj):
            if not isinstance(layer, SplitBackward) or layer.postpone is not None or not layer.is_uniform:
                return 1
        tp, length = self._row.tp, x.shape[0]
        if tp.sequence_parallel:
            length *= tp.axis.size
        return -(-length // longest)

    def in_chunks(self, x: Tensor, num_chunks: int) -> Tensor:
        """`forward` in chunks of the sequence, recomputed in the backward pass: (S/tp, B, D) to (S/tp, B, D)."""
        first, *others = self._columns
        row, entered = self._row, first.enter(x)
        of_first = len(entered)
        for layer in others:
            entered += layer.enter(x)

        def products(part: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
            gate = first.product(part, *parts[:of_first])
            if self._fused:
                return row.product(self._kernels.swiglu(gate))
            return row.product(F.silu(gate) * others[0].product(part, *parts[of_first:]))

        return row.exit(*in_chunks(products, x, entered, [*self.parameters()], row.tp, num_chunks))

    @property
    def _columns(self) -> tuple[ColumnLinear, ...]:
        layers = (self.gate_up_proj,) if self._fused else (self.gate_proj, self.up_proj)
        return cast("tuple[ColumnLinear, ...]", layers)

    @property
    def _row(self) -> RowLinear:
        return cast(RowLinear, self.down_proj)
