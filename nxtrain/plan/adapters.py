"""Low-rank adapters and the frozen model below them: parameters of a stage, and bytes of the frozen ones.

The sizes mirror `finetune/lora.py`. Each linear layer has one adapter for every segment, and these share their input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from nxtrain.common.family import Dimensions
from nxtrain.common.sharding import Segment, ShardSpec
from nxtrain.plan.shapes import Entries, Stage, beside_blocks, block_entries, block_specs, one_block

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a weight in NF4: 4 bits, 8 bits of scale for 64 weights, and a float32 for 256 scales.

Source: Dettmers et al. 2023 (arXiv:2305.14314) section 3, double quantization: 4.127 bits.
"""


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer with adapters.

    Args:
        name: Name of the layer when its projections are fused.
        is_column: Outputs are sharded over tp, not inputs.
        in_features: Whole inputs.
        segments: Outputs with an adapter.
        r: Rank of each adapter.
    """

    name: str
    is_column: bool
    in_features: int
    segments: tuple[Segment, ...]
    r: int

    @property
    def width(self) -> int:
        """Columns between the two matrices of all adapters."""
        return sum(rank.size for rank in self.ranks)

    @property
    def ranks(self) -> tuple[Segment, ...]:
        """Rows of `lora_A`: r for each output of a column layer, which share their inputs; else r."""
        names = [segment.name for segment in self.segments] if self.is_column else [""]
        return tuple(Segment(name, self.r) for name in names)

    def specs(self) -> dict[str, ShardSpec]:
        """Both matrices; the one on the side of the whole features is replicated over tp."""
        outputs = sum(segment.size for segment in self.segments)
        a_shape, b_shape = (self.width, self.in_features), (outputs, self.r)
        if self.is_column:
            both = ShardSpec(a_shape, segments=self.ranks), ShardSpec(b_shape, dim=0, segments=self.segments)
        else:
            both = ShardSpec(a_shape, dim=1), ShardSpec(b_shape)
        return {f"{self.name}.lora_A": both[0], f"{self.name}.lora_B": both[1]}


@dataclass(frozen=True)
class Adapters:
    """Adapters of every block.

    Args:
        r: Rank.
        targets: Linear layers that have one; empty: all of a block.
    """

    r: int
    targets: tuple[str, ...] = ()

    def layers(self, decoder: Dimensions, tp: int, *, fused_qkv: bool, fused_gate_up: bool) -> Iterator[AdaptedLayer]:
        """Layers of a block that have adapters."""
        for name, spec in block_specs(decoder, tp, fused_qkv=fused_qkv, fused_gate_up=fused_gate_up).items():
            if not is_matrix(spec):
                continue
            is_column = spec.dim == 0
            segments = spec.segments if is_column else (Segment(name, spec.shape[0]),)
            chosen = tuple(each for each in segments if not self.targets or each.name in self.targets)
            if chosen:
                yield AdaptedLayer(name, is_column, spec.shape[1], chosen, self.r)


def is_matrix(spec: ShardSpec) -> bool:
    """True for the weight of a linear layer, which may be quantized."""
    return len(spec.shape) > 1


@lru_cache(maxsize=1024)
def adapted_layers(stage: Stage, tp: int, adapters: Adapters) -> tuple[AdaptedLayer, ...]:
    """Layers with adapters in each block of a stage."""
    fused = {"fused_qkv": stage.fused_qkv, "fused_gate_up": stage.fused_gate_up}
    return tuple(adapters.layers(stage.decoder, tp, **fused))


@lru_cache(maxsize=65_536)
def adapter_entries(stage: Stage, tp: int, shard: int, adapters: Adapters) -> Entries:
    """Entries of the adapters of a stage's blocks."""
    block = adapters_of_block(stage, tp, shard, adapters)
    number = sum(stage.blocks)
    return Entries(number * block.local, number * block.rows, block.largest, number * block.padded)


def adapters_of_block(stage: Stage, tp: int, shard: int, adapters: Adapters) -> Entries:
    """Entries of the adapters of one block."""
    specs: dict[str, ShardSpec] = {}
    for layer in adapted_layers(stage, tp, adapters):
        specs |= layer.specs()
    return block_entries(specs, tp, shard)


@dataclass(frozen=True)
class FrozenBytes:
    """Bytes of the frozen parameters of a stage.

    Args:
        block: Of one block, whole over the ranks that share training state.
        rest: Of the parameters outside the blocks, whole as well.
        held: Of the whole stage, as the first rank holds them.
        largest_matrix: Of the largest quantized matrix once it is restored; 0 without quantization.
    """

    block: int
    rest: int
    held: int
    largest_matrix: int


@lru_cache(maxsize=65_536)
def frozen_bytes(stage: Stage, tp: int, shard: int, size: int, *, quantized: bool) -> FrozenBytes:
    """Bytes of a stage's frozen parameters: matrices of the blocks in NF4 or in the type of the model, others so.

    Args:
        stage: Kind of the stage.
        tp: Ranks that share each layer.
        shard: Ranks that share the rows of every parameter.
        size: Bytes of a parameter that the model computes with.
        quantized: Matrices of the blocks are in NF4.
    """
    block, rest = one_block(stage, tp, shard), beside_blocks(stage, tp, shard)
    fused = {"fused_qkv": stage.fused_qkv, "fused_gate_up": stage.fused_gate_up}
    specs = block_specs(stage.decoder, tp, **fused)
    matrices = block_entries({name: spec for name, spec in specs.items() if is_matrix(spec)}, tp, shard)
    narrow = NF4_BYTES if quantized else size
    whole = int(matrices.local * narrow) + (block.local - matrices.local) * size
    held = int(matrices.rows * narrow) + (block.rows - matrices.rows) * size
    return FrozenBytes(
        block=whole,
        rest=rest.local * size,
        held=sum(stage.blocks) * held + rest.rows * size,
        largest_matrix=matrices.largest * size if quantized else 0,
    )
