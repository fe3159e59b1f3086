"""Fused output projection and cross entropy, with the vocabulary sharded over the tensor parallel ranks.

Shapes: T tokens (sequence x batch, flattened), D hidden size, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nxtrain.common.kernels import Kernels
from nxtrain.common.sharding import Init, ShardSpec
from nxtrain.common.vocab import VocabColumns
from nxtrain.parallel.regions import TensorParallel

LOGIT_BYTES = 4
"""Bytes of a logit in cross entropy, which is computed in float32."""


class VocabHead(nn.Module):
    """Output projection with methods `logits` for generation and `loss` for training.

    The loss is a sum over tokens, or with `token_losses` the cross entropy of each token.

    Attributes:
        scale: Function that returns the factor of the loss's gradients, () float32; None for a factor of 1.
        z_loss: Factor of the z-loss, the squared log of the softmax's denominator; 0 for none. Backward adds its
            gradient.
        z_sum: (1,) float32, to which training passes add the z-loss terms.

    Args:
        vocab_size: Unpadded vocabulary; padded rows of the last rank get probability zero.
        hidden_size: D.
        init: Initial values of the weight.
        tp: Tensor parallel context of the layer.
        chunk_bytes: Most bytes of float32 logits that exist at once.
        token_losses: Return each token's loss, for an objective that weighs tokens by the losses of whole answers.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        init: Init,
        tp: TensorParallel,
        *,
        chunk_bytes: int,
        token_losses: bool = False,
    ) -> None:
        super().__init__()
        self.scale: Callable[[], Tensor] | None = None
        self.z_loss = 0.0
        self.z_sum: Tensor | None = None
        spec = ShardSpec.vocab(vocab_size, hidden_size, init)
        self.specs = {"weight": spec}
        self.weight = tp.empty(spec)
        self._tp = tp
        self._token_losses = token_losses
        self._chunk = _chunk_of(tp.kernels, token_losses=token_losses)
        self._piece = spec.pieces(tp.axis)[0]
        self._vocab_size = vocab_size
        self._chunk_rows = max(1, chunk_bytes // (LOGIT_BYTES * self._piece.local_length))
        # Tensors, not numbers: every rank must record the same graph, for any rows.
        self.first: Tensor
        self.register_buffer("first", torch.empty(2, dtype=torch.int64), persistent=False)
        self.padding: Tensor | None
        self.register_buffer("padding", None, persistent=False)
        if self._piece.local_length * tp.axis.size > vocab_size:
            self.register_buffer("padding", torch.empty(self._piece.local_length), persistent=False)

    def host_buffers(self) -> dict[str, Tensor]:
        """Values of the layer's buffers, computed on the host, by buffer name."""
        piece = self._piece
        buffers = {"first": torch.tensor([piece.start, piece.local_length])}
        if self.padding is not None:
            buffers["padding"] = torch.zeros(piece.local_length).index_fill_(
                0, torch.arange(piece.length, piece.local_length), float("-inf")
            )
        return buffers

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy -log p(target): the sum over tokens, or with `token_losses` the loss of each token.

        The gradient of the sum includes the gradient of `z_loss`.

        Args:
            hidden: (S/tp, B, D) hidden states.
            targets: (S, B) integers; a target of `IGNORE_INDEX` has a loss of 0. With a teacher, (S, B, 2R).

        Returns:
            () float32, or with `token_losses` (S, B) float32, equal on all tp ranks.
        """
        whole = self._tp.enter(hidden)
        columns = VocabColumns(self.first, self.padding, self._tp.comm, self._tp.axis)
        if self._token_losses:
            given = (whole.flatten(0, -2), self.weight, targets.flatten(), columns, self._chunk_rows)
            losses: Tensor = _TokenCrossEntropy.apply(*given, self._chunk, self._tp.kernels)
            return losses.view(targets.shape)
        chunk = self._chunk
        if self.scale is not None:
            chunk = partial(chunk, scale=self.scale())
        has_z_loss = self.z_loss > 0.0 and torch.is_grad_enabled()
        if has_z_loss:
            chunk = partial(chunk, z_loss=self.z_loss)
        loss: Tensor = _VocabCrossEntropy.apply(
            whole.flatten(0, -2),
            self.weight,
            targets.flatten(0, 1),
            columns,
            self._chunk_rows,
            chunk,
            self._tp.kernels,
        )
        if has_z_loss:
            assert self.z_sum is not None
            self.z_sum.add_(loss[1].detach())
            return loss[0]
        return loss

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, without gradient: (S/tp, B, D) to (S, B, vocab_size) float32, equal on all ranks."""
        with torch.no_grad():
            whole = self._tp.enter(hidden)
            local = self._tp.kernels.linear(whole, self.weight).float().movedim(-1, 0).contiguous()
            return self._tp.comm.all_gather(local, self._tp.axis)[: self._vocab_size].movedim(0, -1)


_Chunk = Callable[..., tuple[Tensor, "Tensor | None", "Tensor | None"]]


def _chunk_of(kernels: Kernels, *, token_losses: bool = False) -> _Chunk:
    """Build the function that computes loss and gradients of one chunk of tokens.

    The function returns the loss, the gradient of the hidden states and the gradient of the weight; gradients may be
    None. A `scale` multiplies the gradients: () for all tokens, or (T, 1) for each token. With `adds_later`, the third
    result is the gradient of the logits instead, so that its product can be added to a sum.
    """

    # 9 arguments: the tokens, the weight, and the kind of loss and of gradients
    def chunk(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        columns: VocabColumns,
        needs_grad: bool,
        is_trained: bool,
        adds_later: bool,
        scale: Tensor | None = None,
        z_loss: float = 0.0,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logits = kernels.linear(hidden, weight)
        # The scale lifts small probabilities into the range of fp16, so they must not be rounded before.
        scaled = logits if scale is None else logits.float()
        losses, logits_grad = kernels.cross_entropy(scaled, targets, columns, needs_grad=needs_grad, z_loss=z_loss)
        loss = losses
        if not token_losses:
            loss = losses.sum(dim=1) if z_loss else losses.sum()
        if logits_grad is None:
            return loss, None, None
        if scale is not None:
            logits_grad = (logits_grad * scale).to(hidden.dtype)
        weight_grad = None
        if is_trained:
            weight_grad = logits_grad if adds_later else kernels.matmul(logits_grad.t(), hidden)
        return loss, kernels.matmul(logits_grad, weight), weight_grad

    return kernels.fuse(chunk)


class _VocabCrossEntropy(torch.autograd.Function):
    """Cross entropy of hidden states, computed chunk by chunk, so that the full logits never exist.

    The gradients of a sum of losses follow from the logits up to one factor. So forward computes the gradients chunk by
    chunk, and backward only scales them.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053) section 3 for the parallel form; Hsu et al. 2024 (arXiv:2410.10989)
    for gradients in the forward pass.
    """

    @staticmethod
    def forward(  # 8 arguments: the tokens, the weight, and functions; autograd takes no keywords
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        columns: VocabColumns,
        chunk_rows: int,
        chunk: _Chunk,
        kernels: Kernels,
    ) -> Tensor:
        trained = ctx.needs_input_grad[1]
        needs_grad = ctx.needs_input_grad[0] or trained
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grads: list[Tensor] = []
        weight_grad: Tensor | None = None
        adds_later = kernels.adds_products and len(hidden) > chunk_rows
        for h, target in zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True):
            chunk_loss, hidden_part, part = chunk(h, weight, target, columns, needs_grad, trained, adds_later)
            loss = loss + chunk_loss
            if hidden_part is not None:
                hidden_grads.append(hidden_part)
            if part is not None:
                weight_grad = _add_part(weight_grad, part, h, kernels if adds_later else None)
        if not needs_grad:
            return loss
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        hidden_grad = hidden_grads[0]
        if len(hidden_grads) > 1:
            hidden_grad = torch.cat(hidden_grads)
        ctx.save_for_backward(hidden_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        if grad.dim():  # the saved gradients include the z-loss, so the factor of the first sum scales them
            grad = grad[0]
        if weight_grad is not None:
            weight_grad.mul_(grad.to(weight_grad.dtype))
        return hidden_grad.mul_(grad.to(hidden_grad.dtype)), weight_grad, None, None, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    """Cross entropy of each token, computed chunk by chunk; the incoming gradients weigh the tokens in backward.

    The tokens' weights depend on the losses of whole answers, so they are known only after forward. If the output
    projection is frozen, forward computes the gradients of the hidden states, and backward multiplies their rows by the
    weights. A trained projection needs the weights inside of a sum over tokens. Backward then computes the logits
    again: one product of four, instead of keeping the logits.
    """

    @staticmethod
    def forward(  # 8 arguments: the tokens, the weight, and functions; autograd takes no keywords
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        columns: VocabColumns,
        chunk_rows: int,
        chunk: _Chunk,
        kernels: Kernels,
    ) -> Tensor:
        ctx.is_trained = ctx.needs_input_grad[1]
        is_weighed_later = ctx.needs_input_grad[0] and not ctx.is_trained
        losses: list[Tensor] = []
        hidden_grads: list[Tensor] = []
        for h, target in zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True):
            chunk_losses, hidden_part, _ = chunk(h, weight, target, columns, is_weighed_later, False, False)
            losses.append(chunk_losses)
            if hidden_part is not None:
                hidden_grads.append(hidden_part)
        if ctx.is_trained:
            ctx.columns = columns
            ctx.chunk_rows = chunk_rows
            ctx.chunk = chunk
            ctx.kernels = kernels
            ctx.save_for_backward(hidden, weight, targets)
        elif hidden_grads:
            ctx.save_for_backward(torch.cat(hidden_grads))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights = grad.unsqueeze(1)
        if not ctx.is_trained:
            (hidden_grad,) = ctx.saved_tensors
            return (hidden_grad * weights).to(hidden_grad.dtype), None, None, None, None, None, None
        hidden, weight, targets = ctx.saved_tensors
        hidden_grads: list[Tensor] = []
        weight_grad: Tensor | None = None
        adds_later = ctx.kernels.adds_products and len(hidden) > ctx.chunk_rows
        parts = (x.split(ctx.chunk_rows) for x in (hidden, targets, weights))
        for h, target, weighing in zip(*parts, strict=True):
            _, hidden_part, part = ctx.chunk(h, weight, target, ctx.columns, True, True, adds_later, weighing)
            hidden_grads.append(hidden_part)
            weight_grad = _add_part(weight_grad, part, h, ctx.kernels if adds_later else None)
        assert weight_grad is not None
        return torch.cat(hidden_grads), weight_grad.to(weight.dtype), None, None, None, None, None


def _add_part(total: Tensor | None, part: Tensor, hidden: Tensor, kernels: Kernels | None) -> Tensor:
    """Add a chunk's gradient of the output projection to the sum over earlier chunks.

    Several chunks are summed in float32, so that their number hardly affects the result.

    Args:
        total: Sum over the chunks before; None for the first chunk.
        part: Gradient of the weight, or of the logits for kernels that add products.
        hidden: Hidden states of the chunk.
        kernels: Kernels that add a product to a sum; None if `part` is the gradient of the weight.
    """
    if kernels is not None:
        if total is None:
            total = torch.zeros(part.shape[1], hidden.shape[1], dtype=torch.float32, device=hidden.device)
        kernels.add_product(total, part.t(), hidden)
        return total
    if total is None:
        return part
    return total.float().add_(part)
