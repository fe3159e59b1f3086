"""Dropout of adapter inputs with counter-based random bits: equal masks in every layout, recomputation and resume.

An entry is dropped depending on a hash of the seed, the layer, the sequence's index in the run, the position and the
feature. There is no state of a random generator.

These inputs of the hash are tensors on the device. No constant of a step, rank or layer is part of a compiled graph.

Shapes: S sequence, B batch, I features, each of this rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nxtrain.backends.rounding import mix_, random_bits
from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.family import CausalLM
from nxtrain.common.mesh import Axis
from nxtrain.config.schema import RunConfig

Recompute: TypeAlias = Callable[..., Tensor]
"""Function with the signature of `Kernels.recompute`, whose backward pass recomputes a function."""

_ATTRIBUTE = "adapter_dropout"


class LayerDropout:
    """Dropout of one layer's input.

    Args:
        masks: Dropout of the whole model.
        name: Name of the layer.
        positions: Sequence positions of this rank: (S,) int64.
        features: Indices of the input features of this rank.
    """

    def __init__(self, masks: Dropout, name: str, positions: Tensor, features: range) -> None:
        self._masks = masks
        self._name = name
        self._held = (positions, features)
        self._key = self._positions = self._features = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        """Drop entries of an activation, and scale up the others: (S, B, I) to the same shape."""
        masks = self._masks
        if masks.sequences is None:
            return x
        rows = mix_((masks.sequences ^ self._positions.unsqueeze(1)).flatten()) | 1
        bits = random_bits(rows, self._features, self._key)
        return (x / masks.kept).masked_fill((bits < masks.limit).view(x.shape), 0)

    def prepare(self, seed: int, device: torch.device) -> None:
        """Upload the layer's hash inputs to the device."""
        digest = hashlib.blake2b(f"{seed}:dropout:{self._name}".encode(), digest_size=4).digest()
        key = int.from_bytes(digest, "little", signed=True) | 1
        self._key = torch.tensor([key], dtype=torch.int32).to(device)
        positions, features = self._held
        self._positions = _hashes(positions).to(device)
        self._features = _hashes(torch.arange(features.start, features.stop)).to(device)


class Dropout:
    """Dropout of all layers of a model, which counts the passes through each part of the model.

    Args:
        config: Configuration of the run.
        dp: Data parallel axis.
        positions: Positions of this rank between the layers without sequence parallelism: (S,) int64.
        put: Copies a host tensor to the device, as `Backend.put`.

    Attributes:
        sequences: (B,) int32, hashes of the current sequences' indices; None without dropout.
        kept: () float32, share of the entries that are kept.
        limit: () int32, smallest random bits with which an entry is kept.
    """

    def __init__(self, config: RunConfig, dp: Axis, positions: Tensor, put: Callable[[Tensor], Tensor]) -> None:
        train, share = config.train, config.finetune.dropout
        self._seed = config.run.seed
        self._whole = positions
        self._put = put
        self._dp = dp
        self._micro_batch = train.micro_batch
        self._sizes = train.batch_sizes()
        self._layers: list[LayerDropout] = []
        self._passes: list[tuple[int, int]] = []
        self._hooks: list[RemovableHandle] = []
        self._is_ready = False
        self.sequences: Tensor | None = None
        self.kept = torch.tensor(1 - share)
        self.limit = torch.tensor(min(round(share * (1 << 32)), (1 << 32) - 1) - (1 << 31), dtype=torch.int32)

    def of_layer(self, name: str, features: range, sequence: Axis | None = None) -> LayerDropout:
        """Create the dropout of one layer's input.

        Args:
            name: Name of the layer.
            features: Indices of the input features of this rank.
            sequence: Axis over which the positions are sharded; None if this rank has all of them.
        """
        positions = self._whole
        if sequence is not None:
            positions = positions.chunk(sequence.size)[sequence.rank]
        self._layers.append(LayerDropout(self, name, positions, features))
        return self._layers[-1]

    def attach(self, model: nn.Module, parts: Sequence[int]) -> None:
        """Install a hook at the first block of each model part, which counts the training passes.

        Args:
            model: A `CausalLM` with the layers.
            parts: Number of blocks of each part. A part computes the micro-batches of a step in order.
        """
        setattr(model, _ATTRIBUTE, self)
        blocks = iter(cast(CausalLM, model).blocks)
        for part, number in enumerate(parts):
            own = [next(blocks) for _ in range(number)]
            self._hooks.append(own[0].register_forward_pre_hook(partial(self._enter, part)))
        self._passes = [(0, 0)] * len(parts)

    def count_outside(self, model: nn.Module) -> None:
        """Count the passes before the loss of a model, instead of at its first block, which is inside of a graph.

        The index of a sequence would be a constant of the graph.

        Args:
            model: A `CausalLM` of one part, whose whole loss is compiled.
        """
        for hook in self._hooks:
            hook.remove()
        lm = cast(Any, model)
        loss = lm.loss

        def counted(tokens: Tensor, *others: Tensor | None) -> Tensor:
            self._enter(0, model, (tokens,))
            return cast(Tensor, loss(tokens, *others))

        lm.loss = counted

    def begin(self, steps: int, sizes: BatchSizes) -> None:
        """Set the pass counters to a number of finished steps; `sizes` has the global batch size of each step."""
        self._sizes, self._passes = sizes, [(steps, 0)] * len(self._passes)

    def recomputing(self, recompute: Recompute) -> Recompute:
        """Wrap a recompute function so that the recomputation uses the masks of the first call."""

        def of_same_sequences(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
            return recompute(partial(self._within, function), self.sequences, *inputs)

        return of_same_sequences

    def _within(self, function: Callable[..., Tensor], sequences: Tensor | None, *inputs: Any) -> Tensor:
        if torch.compiler.is_compiling():  # the sequences are an input of the graph, and of its recomputation
            return function(*inputs)
        at_work, self.sequences = self.sequences, sequences
        try:
            return function(*inputs)
        finally:
            self.sequences = at_work

    def _enter(self, part: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Set the sequence indices of a pass; a recomputation calls the block's forward directly, and not this hook."""
        if not torch.is_grad_enabled():
            self.sequences = None
            return
        if not self._is_ready:
            for layer in self._layers:
                layer.prepare(self._seed, inputs[0].device)
            self._is_ready = True
        step, done = self._passes[part]
        num_rows = self._sizes.at(step) // self._dp.size
        first = self._sizes.before(step) + self._dp.rank * num_rows + done
        self.sequences = self._put(_hashes(torch.arange(first, first + self._micro_batch)))
        done += self._micro_batch
        if done == num_rows:
            step, done = step + 1, 0
        self._passes[part] = step, done


def resume_dropout(model: nn.Module, steps: int, sizes: BatchSizes) -> None:
    """Set the dropout of a model to a number of finished steps, see `Dropout.begin`; do nothing without dropout."""
    dropout: Dropout | None = getattr(model, _ATTRIBUTE, None)
    if dropout is not None:
        dropout.begin(steps, sizes)


def count_outside(model: nn.Module) -> None:
    """Count the passes outside of a compiled loss, see `Dropout.count_outside`; do nothing without dropout."""
    dropout: Dropout | None = getattr(model, _ATTRIBUTE, None)
    if dropout is not None:
        dropout.count_outside(model)


def _hashes(numbers: Tensor) -> Tensor:
    """Hashes of integers, (count,) int64 to int32, with wraparound."""
    return mix_(numbers.to(torch.int32))
