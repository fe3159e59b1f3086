"""CPU kernels: torch's own, blocked attention for short sequences, and optimizer updates by tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.cpu_attention import blocked_attention, is_short, wide_flash_attention
from nxtrain.backends.cpu_products import dense_vector, has_products, wide_matmul
from nxtrain.backends.ranged_attention import Blocks
from nxtrain.backends.rounding import round_by_pairs_on_host
from nxtrain.backends.torch_attention import attention_by_document
from nxtrain.backends.torch_kernels import FusedKernels, SavingProduct, row_tiles
from nxtrain.common.kernels import ANY_ROWS, AdamStep, Grouping, RoundingKey, Rows

TILE_ENTRIES = 1 << 19
"""Entries of a tile of an optimizer update: they fit the CPU cache, and amortize the calls of operations."""

VECTOR_ENTRIES = 16
"""float32 entries of a cache line, a multiple of every SIMD width of torch's fused AdamW."""

GROUP_ROWS = 32
"""Multiple to which the rows of an expert are padded.

oneDNN compiles a kernel for each number of rows, which costs as much as several small products.
"""

_NARROW = torch.bfloat16, torch.float16


class CpuKernels(FusedKernels):
    """torch's fused CPU kernels, with blocked attention for short sequences and optimizer updates by tiles."""

    host_reads_are_free = True
    _blocks = Blocks(looks=True, score_type=torch.float32)

    def widens(self, dtype: torch.dtype) -> bool:
        """True if matrices of this type are multiplied faster on this CPU after a cast to float32."""
        return not has_products(dtype)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        # The gradient of one output or one row may lie in a wider matrix, and torch's own backward would multiply it.
        has_vector = weight.shape[0] == 1 or x.numel() == x.shape[-1]
        if not self.widens(x.dtype) and not (has_vector and x.dtype in _NARROW):
            return super().linear(dense_vector(x), dense_vector(weight))
        out: Tensor = SavingProduct.apply(x, weight, self)
        return out

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if self.widens(a.dtype):
            return wide_matmul(a, b)
        return super().matmul(dense_vector(a), dense_vector(b))

    def grouping(self, dtype: torch.dtype, sizes: Sequence[int]) -> Grouping:
        if dtype not in _NARROW or self.widens(dtype):
            return ANY_ROWS
        return Grouping(multiple=GROUP_ROWS)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if is_short(q):
            return blocked_attention(q, k, v)
        if self.widens(q.dtype):
            return wide_flash_attention(q, k, v)
        return super().attention(q, k, v)

    def document_attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        if starts is not None and window is None and not torch.compiler.is_compiling():
            return attention_by_document(self.attention, q, k, v, starts)
        return super().document_attention(q, k, v, starts, window)

    def tiles(self, shapes: Mapping[str, Sequence[int]]) -> list[list[Rows]]:
        return [[rows] for rows in row_tiles(shapes, TILE_ENTRIES)]

    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        how: AdamStep,
    ) -> None:
        if isinstance(how.weight_decay, Tensor):
            how = replace(how, weight_decay=how.weight_decay.item())
        for entry in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
            self._update(entry, how)

    def _update(self, entry: Sequence[Tensor], how: AdamStep) -> None:
        left_over = entry[0].numel() % VECTOR_ENTRIES
        if not left_over:
            param, grad, exp_avg, exp_avg_sq = entry
            super().adamw([param], [grad], [exp_avg], [exp_avg_sq], how)
            return
        # torch's kernel rounds entries after the last full vector differently, so these entries are padded to a vector.
        flat = [x.view(-1) for x in entry]
        filled = [F.pad(x[-left_over:], (0, VECTOR_ENTRIES - left_over)) for x in flat]
        self._update(filled, how)
        for x, updated in zip(flat, filled, strict=True):
            x[-left_over:] = updated[:left_over]
        if len(flat[0]) > left_over:
            self._update([x[:-left_over] for x in flat], how)

    def _divisor(self, grad_scale: Tensor) -> Tensor | None:
        # The kernel writes scaled gradients back. The host can read the scale at no cost, and skip this for 1.
        return None if grad_scale.item() == 1 else super()._divisor(grad_scale)

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        round_by_pairs_on_host(x, out, key, step)
