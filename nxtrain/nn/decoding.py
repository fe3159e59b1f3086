"""Incremental decoding with a cache of keys and values, so that a further token costs one token's work.

Model code is unchanged. The decoder replaces the forward of existing modules: attention cores get the keys and values
of all earlier tokens, and rotary embeddings get absolute positions.

Shapes: S new tokens, T capacity of the cache, B batch, N query heads, K key/value heads, R = N / K, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.errors import ConfigError
from nxtrain.family import CausalLM
from nxtrain.nn.attention import CausalAttention
from nxtrain.nn.rope import Rope

CHUNK = 256
"""Tokens of a prompt that are computed at once; bounds the memory of attention scores and logits."""

_FIRST_CAPACITY = 256
"""Initial capacity of a cache in tokens; each growth doubles the capacity, so that compiled graphs are few."""


class Decoder:
    """A model that reads one text incrementally.

    Args:
        model: A `CausalLM` built whole on one rank; changed in place, and not usable for training afterwards.
        put: Moves a host tensor to the device of the model.

    Raises:
        ConfigError: The model's family has attention of its own.
    """

    def __init__(self, model: CausalLM, put: Callable[[Tensor], Tensor]) -> None:
        self._model, self._put = model, put
        self._length, self._capacity = 0, _FIRST_CAPACITY
        self._positions = self._visible = put(torch.empty(0))
        num_cores = 0
        for module in cast(nn.Module, model).modules():
            if isinstance(module, CausalAttention):
                num_cores += 1
                self._replace(module, partial(self._attend, _Cache()))
            elif isinstance(module, Rope):
                self._replace(module, partial(self._turn, module))
        if num_cores != len(model.blocks):
            raise ConfigError("the model's blocks have attention of their own, which does not decode incrementally")

    @torch.no_grad()
    def scores(self, tokens: Sequence[int]) -> Tensor:
        """Read further tokens; return the logits of the next token, (V,) float32 on the host."""
        found = torch.empty(0)
        for start in range(0, len(tokens), CHUNK):
            piece = torch.tensor([list(tokens[start : start + CHUNK])])
            end = self._length + piece.shape[1]
            while self._capacity < end:
                self._capacity *= 2
            # Positions are values on the device, not shapes: a compiler gets one graph for all positions.
            self._positions = self._put(torch.arange(self._length, end))
            self._visible = self._put(torch.arange(self._capacity)) <= self._positions[:, None]
            found = self._model.logits(self._put(piece))[0, -1].float().cpu()
            self._length = end
        return found

    @staticmethod
    def _replace(module: nn.Module, forward: Callable[..., Tensor]) -> None:
        module.forward = forward

    def _turn(self, rope: Rope, x: Tensor) -> Tensor:
        return Rope.forward(rope, x, self._positions)

    def _attend(self, cache: _Cache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(S, B, N, H), (S, B, K, H), (S, B, K, H) to (S, B, N, H)."""
        keys, values = cache.add(k, v, self._positions, self._capacity)
        repeats = q.shape[2] // k.shape[2]
        # The query heads of a key/value head become further queries, so that keys and values are not copied.
        queries = q.unflatten(2, (-1, repeats)).permute(1, 2, 3, 0, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._visible.repeat(repeats, 1))
        heads: Tensor = out.unflatten(2, (repeats, -1))
        return heads.permute(3, 0, 1, 2, 4).flatten(2, 3)


class _Cache:
    """Keys and values of one block, (B, K, T, H); rows of later tokens are zeros."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, ...] = ()

    def add(self, k: Tensor, v: Tensor, positions: Tensor, capacity: int) -> tuple[Tensor, ...]:
        """Write keys and values (S, B, K, H) at their positions, and return the cached ones."""
        new = [x.permute(1, 2, 0, 3) for x in (k, v)]
        if not self._kept:
            self._kept = tuple(x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in new)
        if missing := capacity - self._kept[0].shape[2]:
            self._kept = tuple(F.pad(x, (0, 0, 0, missing)) for x in self._kept)
        for kept, x in zip(self._kept, new, strict=True):
            kept.index_copy_(2, positions, x)
        return self._kept
