"""Feed-forward block with a gated unit.

Shapes: S sequence, B batch, D hidden, F intermediate of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.common.dimensions import gate_up_segments
from nxtrain.common.sharding import Init

if TYPE_CHECKING:
    from nxtrain.common.family import BuildContext


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)).

    If tp does not divide the intermediate size, the size is padded. Padded columns are zero on both sides of the
    product, stay zero and contribute nothing.

    Args:
        hidden_size: D.
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
        """(S/tp, B, D) to (S/tp, B, D)."""
        if self._fused:
            hidden = self._kernels.swiglu(self.gate_up_proj(x))
        else:
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden)  # type: ignore[no-any-return]
