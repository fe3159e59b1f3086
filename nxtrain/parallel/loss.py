"""Fused output projection and cross entropy, over a vocabulary sharded over the tensor parallel ranks.

Shapes: T tokens (sequence x batch, flattened), D hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.distributed.collectives import Collectives
from nxtrain.family import IGNORE_INDEX
from nxtrain.mesh import Axis
from nxtrain.parallel.regions import TensorParallel
from nxtrain.sharding import Init, ShardSpec


class VocabHead(nn.Module):
    """Output projection: `logits` for generation, `loss` for training.

    Args:
        vocab_size: Unpadded vocabulary; padded rows of the last rank get probability zero.
        hidden_size: D.
        init: Initial values of the weight.
        tp: Tensor parallel context of the layer.
        chunk_bytes: Most bytes of float32 logits that exist at once.
    """

    def __init__(self, vocab_size: int, hidden_size: int, init: Init, tp: TensorParallel, *, chunk_bytes: int) -> None:
        super().__init__()
        spec = ShardSpec((vocab_size, hidden_size), dim=0, init=init)
        self.specs = {"weight": spec}
        self.weight = tp.empty(spec)
        self._tp = tp
        self._piece = spec.pieces(tp.axis)[0]
        self._vocab_size = vocab_size
        self._chunk_rows = max(1, chunk_bytes // (4 * self._piece.local_length))
        # Tensors, not numbers: every rank must record the same graph, for any rows.
        self.first: Tensor
        self.register_buffer("first", torch.empty(2, dtype=torch.int64), persistent=False)
        self.padding: Tensor | None
        padded = self._piece.local_length * tp.axis.size > vocab_size
        self.register_buffer("padding", torch.empty(self._piece.local_length) if padded else None, persistent=False)

    def host_buffers(self) -> dict[str, Tensor]:
        """Values of the buffers, computed on the host."""
        piece = self._piece
        buffers = {"first": torch.tensor([piece.start, piece.local_length])}
        if self.padding is not None:
            buffers["padding"] = torch.zeros(piece.local_length).index_fill_(
                0, torch.arange(piece.length, piece.local_length), float("-inf")
            )
        return buffers

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum over the tokens of -log p(target).

        Args:
            hidden: (S/tp, B, D).
            targets: (S, B) integers; `IGNORE_INDEX` does not count.

        Returns:
            () float32, equal on all tp ranks.
        """
        whole = self._tp.enter(hidden)
        loss: Tensor = _VocabCrossEntropy.apply(
            whole.flatten(0, -2),
            self.weight,
            targets.flatten(),
            self.first,
            self.padding,
            self._tp.comm,
            self._tp.axis,
            self._chunk_rows,
        )
        return loss

    def logits(self, hidden: Tensor) -> Tensor:
        """(S/tp, B, D) to (S, B, vocab_size) float32, whole on every rank; not differentiable."""
        with torch.no_grad():
            whole = self._tp.enter(hidden)
            local = F.linear(whole, self.weight).float().movedim(-1, 0).contiguous()
            return self._tp.comm.all_gather(local, self._tp.axis)[: self._vocab_size].movedim(0, -1)


class _VocabCrossEntropy(torch.autograd.Function):
    """Cross entropy from hidden states, chunk by chunk, so that the full logits never exist.

    The gradients of a sum follow from the logits up to one factor. So forward computes them chunk by chunk, and
    backward only scales them. The arithmetic on logits is float32.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053) section 3 for the parallel form; Hsu et al. 2024 (arXiv:2410.10989)
    for gradients in the forward pass.
    """

    @staticmethod
    def forward(  # 9 arguments: autograd passes its inputs one by one
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: Tensor,
        padding: Tensor | None,
        comm: Collectives,
        axis: Axis,
        chunk_rows: int,
    ) -> Tensor:
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grads: list[Tensor] = []
        weight_grad: Tensor | None = None
        for h, target in zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True):
            logits = F.linear(h, weight)
            chunk_loss, logits_grad = _chunk(logits, target, first, padding, comm, axis, needs_grad)
            loss = loss + chunk_loss
            if logits_grad is not None:
                hidden_grads.append(logits_grad @ weight)
                part = logits_grad.t() @ h
                # Several chunks are summed in float32, so that their number hardly changes the result's rounding.
                weight_grad = part if weight_grad is None else weight_grad.float().add_(part)
        if weight_grad is not None:
            hidden_grad = hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads)
            ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad.mul_(grad.to(hidden_grad.dtype)), weight_grad.mul_(grad.to(weight_grad.dtype)), *[None] * 6


def _chunk(
    logits: Tensor,
    targets: Tensor,
    first: Tensor,
    padding: Tensor | None,
    comm: Collectives,
    axis: Axis,
    needs_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Loss of a chunk and the gradient of its logits.

    Args:
        logits: (T, V), this rank's columns; overwritten.
        targets: (T,) over the whole vocabulary, or `IGNORE_INDEX`.
        first: First vocabulary row of this rank, and its number of rows.
        padding: (V,) 0 for a true row, -inf for a padded one; None without padding.
        comm: Collectives.
        axis: Tensor parallel axis.
        needs_grad: Compute the gradient.

    Returns:
        Sum of the losses, (), and the gradient, (T, V) in the type of `logits`, or None.
    """
    dtype = logits.dtype
    scores = logits.float() if padding is None else logits.float() + padding
    counted = targets != IGNORE_INDEX
    local = targets - first[0]
    here = counted & (local >= 0) & (local < first[1])
    column = local.masked_fill(~here, 0).unsqueeze(1)

    peak = comm.all_reduce(scores.amax(dim=1), axis, "max")
    target_score = torch.where(here, scores.gather(1, column).squeeze(1), torch.zeros_like(peak))
    exp = scores.sub_(peak.unsqueeze(1)).exp_()
    sums = comm.all_reduce(torch.stack([exp.sum(dim=1), target_score]), axis)
    losses = sums[0].log() + peak - sums[1]
    loss = torch.where(counted, losses, torch.zeros_like(losses)).sum()
    if not needs_grad:
        return loss, None
    grad = exp.mul_((counted.float() / sums[0]).unsqueeze(1))
    grad.scatter_add_(1, column, -here.float().unsqueeze(1))
    return loss, grad.to(dtype)
