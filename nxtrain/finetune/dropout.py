"""Dropout before adapters, from counter-based bits: the same masks on every layout, in recomputation and on resume.

An entry is left out by the hash of the seed, the layer, the number of its sequence in the run, its position and its
feature. No state of a random generator is involved.

Shapes: S sequence, B batch, I features of this rank.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from nxtrain.backends.rounding import mix_, random_bits
from nxtrain.config.schema import RunConfig
from nxtrain.mesh import Axis

_ATTRIBUTE = "adapter_dropout"


class Dropout:
    """Masks of all layers of a model.

    Args:
        config: Configuration of the run.
        dp: Data parallel axis.
    """

    def __init__(self, config: RunConfig, dp: Axis) -> None:
        train = config.train
        self._share, self._seed = config.finetune.dropout, config.run.seed
        self._global_batch, self._micro_batch = train.global_batch, train.micro_batch
        self._num_micro = train.global_batch // (train.micro_batch * dp.size)
        self._first = dp.rank * train.global_batch // dp.size
        self._passes, self._active = 0, False

    def attach(self, model: nn.Module, first_block: nn.Module) -> None:
        """Count the training passes through a model, by those through its first block."""
        setattr(model, _ATTRIBUTE, self)
        first_block.register_forward_pre_hook(self._count)

    def begin(self, steps: int) -> None:
        """Go on after finished steps."""
        self._passes = steps * self._num_micro

    def __call__(self, x: Tensor, layer: str, position: int, feature: int) -> Tensor:
        """Leave entries of an activation out, and scale the others up: (S, B, I) to the same shape.

        Args:
            x: Part of the input of a layer.
            layer: Name of the layer.
            position, feature: Place of the first entry in the whole input.
        """
        if not self._active:
            return x
        step, micro = divmod(self._passes - 1, self._num_micro)
        row = step * self._global_batch + self._first + micro * self._micro_batch
        sequences, positions = _hashes(row, x.shape[1], x), _hashes(position, x.shape[0], x)
        mixed = sequences ^ positions.unsqueeze(1)
        bits = random_bits(mix_(mixed).flatten() | 1, _hashes(feature, x.shape[2], x), self._key(layer, x))
        limit = -(1 << 31) + round(self._share * (1 << 32))
        return torch.where((bits >= limit).view(x.shape), x / (1 - self._share), 0)

    def _key(self, layer: str, x: Tensor) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}:dropout:{layer}".encode(), digest_size=4).digest()
        return torch.tensor(int.from_bytes(digest, "little", signed=True) | 1, dtype=torch.int32, device=x.device)

    def _count(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        # A recomputation calls the block's forward itself, and so is not counted.
        self._active = torch.is_grad_enabled()
        self._passes += self._active


def resume_dropout(model: nn.Module, steps: int) -> None:
    """Let the masks of a model go on after finished steps; does nothing without dropout."""
    if (dropout := getattr(model, _ATTRIBUTE, None)) is not None:
        dropout.begin(steps)


def _hashes(start: int, count: int, like: Tensor) -> Tensor:
    """Hashes of adjacent numbers: (count,) int32; numbers wrap around."""
    numbers = torch.arange(start, start + count, device=like.device)
    return mix_(numbers.to(torch.int32, copy=True))
