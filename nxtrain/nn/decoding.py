"""Incremental decoding with a KV cache, so that each further token costs only one token's computation.

Model code is unchanged. The decoder replaces the forward methods of existing modules. Attention gets the keys and
values of all earlier tokens, and rotary embeddings get absolute positions.

Texts of different lengths are processed in one batch, with padding on the right. Keys and values of padding go to a
last row of the cache, which is masked for all queries, so that padding has no effect.

Shapes: S new tokens, T capacity of the cache, B texts, N query heads, K key/value heads, R = N / K, H head dimension,
V vocabulary. N and K are of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.common.errors import ConfigError
from nxtrain.common.family import CausalLM
from nxtrain.nn.attention import CausalAttention
from nxtrain.nn.rope import Rope

CHUNK = 256
"""Maximum number of tokens, over all texts, computed at once. Bounds the memory of attention scores and logits."""

_FIRST_CAPACITY = 256
"""Initial capacity of a KV cache in tokens. Each growth doubles the capacity, so that few graphs are compiled."""


class Decoder:
    """Incremental decoder of several texts at a time, with a KV cache.

    Args:
        model: A `CausalLM` with all of its layers on each rank; changed in place, and not usable for training
            afterwards.
        put: Moves a host tensor to the device of the model.

    Raises:
        ConfigError: The model's family has its own attention module.
    """

    def __init__(self, model: CausalLM, put: Callable[[Tensor], Tensor]) -> None:
        self._model, self._put = model, put
        self._caches: list[_Cache] = []
        for module in cast(nn.Module, model).modules():
            if isinstance(module, CausalAttention):
                self._caches.append(_Cache())
                self._replace(module, partial(self._attend, self._caches[-1], module.window))
            elif isinstance(module, Rope):
                self._replace(module, partial(self._turn, module))
        if len(self._caches) != len(model.blocks):
            raise ConfigError("the model's blocks have attention of their own, which does not decode incrementally")
        self.begin(1)

    def begin(self, num_texts: int, capacity: int = 0) -> None:
        """Clear the KV cache, and begin with new empty texts.

        Args:
            num_texts: Number of texts B.
            capacity: Initial capacity of the cache in tokens; 0 for a default of some hundreds.
        """
        self._lengths, self._capacity = [0] * num_texts, capacity or _FIRST_CAPACITY
        self._positions = self._rows = torch.empty(0)
        self._visible: dict[int | None, Tensor] = {}
        for cache in self._caches:
            cache.clear()

    def scores(self, pieces: Sequence[Sequence[int]]) -> Tensor:
        """Process further tokens of each text, and return the logits of its next token.

        Args:
            pieces: New tokens of each text; may be empty.

        Returns:
            (B, V) float32 logits of the next token, on the host. Rows of texts without new tokens are zeros.
        """
        all_logits = torch.empty(0)
        for start, logits in self.read(pieces):
            if not len(all_logits):
                all_logits = torch.zeros(len(pieces), logits.shape[2])
            for text, piece in enumerate(pieces):
                if start < len(piece) <= start + logits.shape[1]:
                    all_logits[text] = logits[text, len(piece) - 1 - start].float().cpu()
        return all_logits

    def read(self, pieces: Sequence[Sequence[int]], chunk: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Process further tokens of each text, one chunk at a time, and yield the logits of each chunk.

        Args:
            pieces: New tokens of each text; may be empty.
            chunk: Maximum number of tokens, over all texts, computed at once; 0 for `CHUNK`.

        Yields:
            Index of the chunk's first token in each piece, and (B, S, V) logits after each token, on the device. Logits
            after the end of a piece are undefined.
        """
        width = max(1, (chunk or CHUNK) // len(pieces))
        for start in range(0, max(map(len, pieces)), width):
            part = [piece[start : start + width] for piece in pieces]
            yield start, self._compute(part)

    @torch.no_grad()
    def _compute(self, pieces: Sequence[Sequence[int]]) -> Tensor:
        """Compute the logits (B, S, V) of one chunk of tokens."""
        lengths, sizes = self._lengths, [len(piece) for piece in pieces]
        width, ends = max(sizes), [length + size for length, size in zip(lengths, sizes, strict=True)]
        while self._capacity < max(ends):
            self._capacity *= 2
        tokens = torch.zeros(len(pieces), width, dtype=torch.int64)
        for text, piece in enumerate(pieces):
            tokens[text, : len(piece)] = torch.tensor(piece, dtype=torch.int64)
        steps = torch.arange(width)
        is_padding = steps >= torch.tensor(sizes)[:, None]
        positions = (torch.tensor(lengths)[:, None] + steps).masked_fill(is_padding, 0)
        # Positions are values on the device, not shapes: a compiler gets one graph for all positions.
        self._positions = self._put(positions.t().contiguous())
        self._rows = self._put(positions.masked_fill(is_padding, self._capacity))
        self._visible.clear()
        self._lengths = ends
        return self._model.logits(self._put(tokens))

    @staticmethod
    def _replace(module: nn.Module, forward: Callable[..., Tensor]) -> None:
        module.forward = forward

    def _turn(self, rope: Rope, x: Tensor) -> Tensor:
        return Rope.forward(rope, x, self._positions)

    def _attend(  # 8 arguments: of the block, and those of its attention core
        self,
        cache: _Cache,
        window: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None = None,
        positions: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention to the cached keys and values: q (S, B, N, H), k and v (S, B, K, H) to (S, B, N, H)."""
        keys, values = cache.add(k, v, self._rows, self._capacity)
        repeats = q.shape[2] // k.shape[2]
        # The query heads of a key/value head become further queries, so that keys and values are not copied.
        queries = q.unflatten(2, (-1, repeats)).permute(1, 2, 3, 0, 4).flatten(2, 3)
        visible = self._visible_in(window).repeat(1, repeats, 1).unsqueeze(1)
        if sinks is not None:
            # A key of zeros has the score 0, to which the mask adds the sink; its value is zeros as well.
            of_heads = sinks.to(q.dtype).view(1, -1, repeats, 1, 1)
            of_heads = of_heads.expand(q.shape[1], -1, -1, q.shape[0], -1).flatten(2, 3)
            scores = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, float("-inf"))
            visible = torch.cat([scores.expand(-1, k.shape[2], -1, -1), of_heads], dim=-1)
            keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
        heads: Tensor = out.unflatten(2, (repeats, -1))
        return heads.permute(3, 0, 1, 2, 4).flatten(2, 3)

    def _visible_in(self, window: int | None) -> Tensor:
        """Attention mask of the cached keys for each new token: (B, S, T + 1)."""
        if window not in self._visible:
            keys = self._put(torch.arange(self._capacity + 1))
            positions = self._positions.t()[..., None]
            visible = keys <= positions
            if window is not None:
                visible = visible & (keys > positions - window)
            self._visible[window] = visible
        return self._visible[window]


class _Cache:
    """KV cache of one block, (B, K, T + 1, H): one row per position, and a last row for padding."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, ...] = ()

    def clear(self) -> None:
        """Clear all keys and values."""
        self._kept = ()

    def add(self, k: Tensor, v: Tensor, rows: Tensor, capacity: int) -> tuple[Tensor, ...]:
        """Write keys and values (S, B, K, H) to the cache rows (B, S), and return the whole cache."""
        new = [x.permute(1, 2, 0, 3) for x in (k, v)]
        if not self._kept:
            self._kept = tuple(x.new_zeros(*x.shape[:2], capacity + 1, x.shape[3]) for x in new)
        missing = capacity + 1 - self._kept[0].shape[2]
        if missing:
            self._kept = tuple(F.pad(x, (0, 0, 0, missing)) for x in self._kept)
        for kept, x in zip(self._kept, new, strict=True):
            kept.scatter_(2, rows[:, None, :, None].expand_as(x), x)
        return self._kept
