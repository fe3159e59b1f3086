"""Vocabulary embedding whose rows are sharded over the tensor parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.common.sharding import Init, ShardSpec
from nxtrain.parallel.regions import TensorParallel


class _WideLookup(torch.autograd.Function):
    """Autograd function of an embedding whose backward sums the gradients of each token id in float32.

    On CPUs and on XLA, torch's own backward adds them one after another in the type of the weight. In bfloat16, with 8
    significant bits, the sum of a frequent token id loses most of the later gradients.

    With `reads`, the host reads the token ids of the batch, so that only these have float32 sums.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, reads: bool) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.reads = weight.shape, reads
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = ctx.saved_tensors
        backward, dtype = torch.ops.aten.embedding_dense_backward, grad.dtype
        if not ctx.reads:
            return None, backward(grad.float(), tokens, ctx.shape[0], -1, False).to(dtype), None
        ids, rows = tokens.unique(return_inverse=True)
        sums = backward(grad.float(), rows, len(ids), -1, False).to(dtype)
        return None, grad.new_zeros(ctx.shape).index_copy_(0, ids, sums), None


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
            return self._rows(tokens)
        local = tokens - self.first[0]
        elsewhere = (local < 0) | (local >= self._piece.local_length)
        rows = self._rows(local.masked_fill(elsewhere, 0))
        return self._tp.exit(rows * (~elsewhere).unsqueeze(-1).to(rows.dtype))

    def _rows(self, tokens: Tensor) -> Tensor:
        """Look up rows of this rank. GPUs and torch.compile sum the gradients of a row in float32 by themselves."""
        tp, weight = self._tp, self.weight
        reads = tp.kernels.host_reads_are_free
        is_wide = weight.dtype.itemsize > torch.bfloat16.itemsize
        if is_wide or not (reads or tp.comm.lazy) or torch.compiler.is_compiling():
            return F.embedding(tokens, weight)
        rows: Tensor = _WideLookup.apply(tokens, weight, reads)
        return rows
