"""Predicted size of low-rank adapters and of the frozen model: parameters of a stage, and bytes of frozen parameters.

Each linear layer has one adapter for every segment, and the adapters of a layer share their input, as in `nn/lora.py`.
Gate and values of an expert have one adapter together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from nxtrain.common.dimensions import Dimensions, adapter_specs, expert_adapter_specs, is_matrix
from nxtrain.common.sharding import Segment, ShardSpec
from nxtrain.plan.shapes import Entries, Stage, block_entries, rest_entries, sum_entries

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes per weight in NF4: 4 bits, an 8-bit scale for 64 weights, and a float32 for 256 scales.

Source: Dettmers et al. 2023 (arXiv:2305.14314) section 3, double quantization: 4.127 bits.
"""


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of every block.

    Args:
        r: Rank of the adapters.
        targets: Names of the linear layers with adapters; empty for all linear layers of a block.
    """

    r: int
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdaptedLayer:
    """Linear layer with low-rank adapters.

    Args:
        path: Path of the layer inside the block.
        weight: Sharding of the layer's weight.
        segments: Segments of the weight that have an adapter.
        r: Rank of each adapter.
    """

    path: str
    weight: ShardSpec
    segments: tuple[Segment, ...]
    r: int

    @property
    def name(self) -> str:
        """Name of the layer: the last part of its path."""
        return self.path.rpartition(".")[2]

    @property
    def is_column(self) -> bool:
        """True if the layer's outputs are sharded over tp, False if its inputs are."""
        return self.weight.dim == 0

    @property
    def width(self) -> int:
        """Width of the activations between adapter matrices A and B, over all adapters of the layer."""
        if self.is_column:
            return len(self.segments) * self.r
        return self.r

    def specs(self) -> dict[str, ShardSpec]:
        """Sharding of the adapter matrices A and B, by parameter name inside the block."""
        a, b = adapter_specs(self.weight, self.segments, self.r)
        return {f"{self.path}.lora_A": a, f"{self.path}.lora_B": b}


@lru_cache(maxsize=1024)
def adapted_layers(stage: Stage, tp: int, adapters: Adapters) -> tuple[AdaptedLayer, ...]:
    """Linear layers with adapters in each block of a stage."""
    layers = []
    for name, weight in stage.block_specs(tp).items():
        if not is_matrix(weight):
            continue
        path = name.removesuffix(".weight")
        segments = weight.segments
        if weight.dim == 1:
            segments = (Segment(path.rpartition(".")[2], weight.shape[0]),)
        chosen = tuple(segment for segment in segments if not adapters.targets or segment.name in adapters.targets)
        if chosen:
            layers.append(AdaptedLayer(path, weight, chosen, adapters.r))
    return tuple(layers)


def expert_adapters(stage: Stage, tp: int, adapters: Adapters, ep_rank: int = 0) -> dict[str, dict[str, ShardSpec]]:
    """Adapters of the experts in each block of a stage: sharding by parameter name, for each module path."""
    by_module: dict[str, dict[str, ShardSpec]] = {}
    for name, weight in stage.block_specs(tp, ep_rank).items():
        path = name.removesuffix(".weight")
        if weight.expert and ".".join(path.split(".")[-2:]) in adapters.targets:
            a, b = expert_adapter_specs(weight, adapters.r)
            by_module[path] = {f"{path}.lora_A": a, f"{path}.lora_B": b}
    return by_module


@lru_cache(maxsize=65_536)
def adapter_entries(stage: Stage, tp: int, shard: int, adapters: Adapters) -> Entries:
    """Number of adapter parameters of one block."""
    specs: dict[str, ShardSpec] = {}
    for layer in adapted_layers(stage, tp, adapters):
        specs |= layer.specs()
    for of_experts in expert_adapters(stage, tp, adapters).values():
        specs |= of_experts
    return sum_entries(specs, tp, shard, stage.ep)


@lru_cache(maxsize=65_536)
def stage_adapters(stage: Stage, tp: int, shard: int, adapters: Adapters) -> Entries:
    """Number of adapter parameters of a pipeline stage."""
    blocks = adapter_entries(stage, tp, shard, adapters).times(stage.num_blocks - stage.num_dense)
    return blocks.plus(adapter_entries(stage.dense, tp, shard, adapters).times(stage.num_dense))


def num_adapter_params(dimensions: Dimensions, adapters: Adapters) -> int:
    """Number of adapter parameters of a whole model."""
    num_dense = len(dimensions.dense_layers)
    whole = Stage(dimensions, (dimensions.num_layers,), first=True, last=True, num_dense=num_dense)
    return stage_adapters(whole, 1, 1, adapters).local


@dataclass(frozen=True)
class FrozenBytes:
    """Bytes of the frozen parameters of a stage.

    Args:
        block: Bytes of the largest block, unsharded over the ranks that share training state.
        blocks: Bytes of all blocks, unsharded as well.
        rest: Bytes of the parameters outside the blocks, unsharded as well.
        held: Bytes of the whole stage that the first rank holds.
        largest_matrix: Bytes of the largest quantized matrix after dequantization; 0 without quantization.
    """

    block: int = 0
    blocks: int = 0
    rest: int = 0
    held: int = 0
    largest_matrix: int = 0


@lru_cache(maxsize=65_536)
def matrix_entries(stage: Stage, tp: int, shard: int) -> Entries:
    """Number of matrix entries of one block, without vectors such as norm weights."""
    specs = {name: spec for name, spec in stage.block_specs(tp).items() if is_matrix(spec)}
    return sum_entries(specs, tp, shard)


@lru_cache(maxsize=65_536)
def frozen_bytes(stage: Stage, tp: int, shard: int, size: int, *, quantized: bool) -> FrozenBytes:
    """Bytes of a stage's frozen parameters; with quantization the matrices of the blocks are in NF4, others never.

    Args:
        stage: Kind of the stage.
        tp: Number of tensor parallel ranks.
        shard: Number of ranks that shard the rows of every parameter.
        size: Bytes of a parameter in the type of the computation.
        quantized: Matrices of the blocks are in NF4.
    """
    rest = rest_entries(stage, tp, shard)
    matrix_size: float = NF4_BYTES if quantized else size
    largest_block = all_blocks = largest_matrix = 0
    held = rest.rows * size
    for number, kind in ((stage.num_blocks - stage.num_dense, stage), (stage.num_dense, stage.dense)):
        if not number:
            continue
        block, matrices = block_entries(kind, tp, shard), matrix_entries(kind, tp, shard)
        whole = int(matrices.local * matrix_size) + (block.local - matrices.local) * size
        held += number * (int(matrices.rows * matrix_size) + (block.rows - matrices.rows) * size)
        largest_block, all_blocks = max(largest_block, whole), all_blocks + number * whole
        if quantized:
            largest_matrix = max(largest_matrix, matrices.largest * size)
    return FrozenBytes(largest_block, all_blocks, rest.local * size, held, largest_matrix)
