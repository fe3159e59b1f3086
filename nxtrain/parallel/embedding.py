"""Vocabulary embedding whose rows are sharded over the tensor parallel ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.common.sharding import Init, ShardSpec
from nxtrain.parallel.regions import TensorParallel


class VocabEmbedding(nn.Module):
    """Embedding in which each rank looks up its own vocabulary rows, and a sum over the tp ranks completes the lookup.

    Args:
        vocab_size: V, unpadded; if tp does not divide V, the last rank's rows are padded with zeros.
        hidden_size: D.
        init: Initial values of the weight.
        tp: Tensor parallel context of the layer.
    """

    def __init__(self, vocab_size: int, hidden_size: int, init: Init, tp: TensorParallel) -> None:
        super().__init__()
        spec = ShardSpec.vocab(vocab_size, hidden_size, init)
        self.specs = {"weight": spec}
        self.weight = tp.empty(spec)
        self._tp = tp
        self._piece = spec.pieces(tp.axis)[0]
        # A tensor, not a number: every rank must record the same graph, for any rows.
        self.first: Tensor
        self.register_buffer("first", torch.empty(2, dtype=torch.int64), persistent=False)

    def host_buffers(self) -> dict[str, Tensor]:
        """Values of the layer's buffers, computed on the host, by buffer name."""
        return {"first": torch.tensor([self._piece.start, self._piece.local_length])}

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up token embeddings: (S, B) integers to (S/tp, B, D)."""
        if self._tp.axis.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first[0]
        elsewhere = (local < 0) | (local >= self._piece.local_length)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self._tp.exit(rows * (~elsewhere).unsqueeze(-1).to(rows.dtype))
