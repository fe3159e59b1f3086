"""Stages of a pipeline, and the entries of their parameters on one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from nxtrain.common.dimensions import EMBEDDING, HEAD, Dimensions, block_specs, rest_specs
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import ShardSpec
from nxtrain.common.stages import StagePart, split_layers, split_layers_at


@dataclass(frozen=True)
class Entries:
    """Number of entries of some parameters.

    Args:
        local: Entries of a tensor parallel rank.
        rows: Entries of the same that the first of the ranks sharing training state holds, padding included.
        largest: Local entries of the largest parameter.
        padded: Local entries of the parameters whose rows these ranks cannot share evenly.
        experts: Local entries of experts.
    """

    local: int
    rows: int
    largest: int
    padded: int = 0
    experts: int = 0

    def times(self, number: int) -> Entries:
        """Entries of a number of equal blocks."""
        largest = self.largest if number else 0
        return Entries(number * self.local, number * self.rows, largest, number * self.padded, number * self.experts)

    def plus(self, other: Entries) -> Entries:
        """Entries of both."""
        return Entries(
            self.local + other.local,
            self.rows + other.rows,
            max(self.largest, other.largest),
            self.padded + other.padded,
            self.experts + other.experts,
        )


@lru_cache(maxsize=1024)
def axis_of(size: int) -> Axis:
    """Axis of a number of ranks, of which this is the first, which holds the most."""
    return Axis("tp", 0, (tuple(range(size)),))


@lru_cache(maxsize=65_536)
def _spec_entries(spec: ShardSpec, tp: int, shard: int) -> Entries:
    """Entries of a parameter: `ShardSpec.local_shape` over tp, and `row_cut` of its first dimension over `shard`."""
    shape = spec.local_shape(axis_of(tp))
    local = math.prod(shape)
    rows = -(-shape[0] // shard) * math.prod(shape[1:])
    padded = local if rows * shard > local else 0
    return Entries(local, rows, local, padded, local if spec.expert else 0)


def sum_entries(specs: Mapping[str, ShardSpec], tp: int, shard: int, ep: int = 1) -> Entries:
    """Sum of the entries of some parameters that a rank holds.

    Args:
        specs: Sharding of each parameter.
        tp: Ranks that share each layer.
        shard: Ranks that share the rows of every parameter but those of experts.
        ep: Ranks that share the experts; of `shard` ranks, every `ep`-th has the same experts.
    """
    total = Entries(0, 0, 0)
    for spec in specs.values():
        rows = max(1, shard // ep) if spec.expert else shard
        total = total.plus(_spec_entries(spec, tp, rows))
    return total


@dataclass(frozen=True)
class Stage:
    """Kind of a pipeline rank's stage.

    Args:
        dimensions: Dimensions of the model.
        blocks: Number of blocks of each chunk.
        first, last: The rank has the embedding, and the output projection.
        fused_qkv, fused_gate_up: As in `[model]`.
        ep: Ranks that share the experts of a block.
        num_dense: Blocks without experts, in a model whose other blocks have experts.
    """

    dimensions: Dimensions
    blocks: tuple[int, ...]
    first: bool
    last: bool
    fused_qkv: bool = True
    fused_gate_up: bool = True
    ep: int = 1
    num_dense: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of all chunks."""
        return sum(self.blocks)

    @property
    def dense(self) -> Stage:
        """Stage with the same blocks of a model in which no block has experts."""
        return replace(self, dimensions=self.dimensions.dense, ep=1, num_dense=0)

    def block_specs(self, tp: int, ep_rank: int = 0) -> dict[str, ShardSpec]:
        """Parameters of each block, by names inside the block; in a model with experts, of a block that has them.

        Args:
            tp: Ranks that share each layer.
            ep_rank: Position of the rank among those that share the experts.
        """
        dimensions = self.dimensions
        specs = block_specs(dimensions, tp, fused_qkv=self.fused_qkv, fused_gate_up=self.fused_gate_up)
        mixture = dimensions.mixture
        if mixture is None or self.ep == 1:
            return specs
        share = mixture.num_experts // self.ep
        own = mixture.specs(dimensions.hidden_size, range(ep_rank * share, (ep_rank + 1) * share))
        return specs | {f"{mixture.module}.{name}": spec for name, spec in own.items()}

    def rest_specs(self) -> dict[str, ShardSpec]:
        """Parameters outside the blocks."""
        return rest_specs(self.dimensions, first=self.first, last=self.last)

    @property
    def lone_units(self) -> tuple[str, ...]:
        """Parameters that full sharding gathers alone: embedding and output projection, unless one matrix is both."""
        if self.first and self.last and self.dimensions.tied:
            return ()
        names = (EMBEDDING,) if self.first else ()
        return (*names, HEAD) if self.last else names


@lru_cache(maxsize=1024)
def stage_parts(
    dimensions: Dimensions, seq_len: int, pp: int, virtual_pp: int, cuts: tuple[int, ...] = ()
) -> list[tuple[StagePart, ...]]:
    """Parts of every pipeline rank, as `train/build.py` deals them."""
    if cuts:
        parts = split_layers_at(dimensions.num_layers, cuts)
    else:
        parts = split_layers(dimensions.num_layers, pp * virtual_pp, dimensions.layer_costs(seq_len))
    return [parts[rank::pp] for rank in range(pp)]


@lru_cache(maxsize=1024)
def pipeline_stages(shape: Stage, seq_len: int, pp: int, virtual_pp: int, cuts: tuple[int, ...]) -> tuple[Stage, ...]:
    """Stage of every pipeline rank; `shape` has what they share."""
    stages = []
    for parts in stage_parts(shape.dimensions, seq_len, pp, virtual_pp, cuts):
        blocks = tuple(len(part.blocks) for part in parts)
        first, last = any(part.first for part in parts), any(part.last for part in parts)
        num_dense = sum(index in part.blocks for part, index in product(parts, shape.dimensions.dense_layers))
        stages.append(replace(shape, blocks=blocks, first=first, last=last, num_dense=num_dense))
    return tuple(stages)


@lru_cache(maxsize=65_536)
def stage_entries(stage: Stage, tp: int, shard: int) -> Entries:
    """Entries of all parameters of a stage."""
    blocks = block_entries(stage, tp, shard).times(stage.num_blocks - stage.num_dense)
    dense = block_entries(stage.dense, tp, shard).times(stage.num_dense)
    return blocks.plus(dense).plus(rest_entries(stage, tp, shard))


@lru_cache(maxsize=65_536)
def block_entries(stage: Stage, tp: int, shard: int) -> Entries:
    """Entries of one block of a stage; in a model with experts, of a block that has them."""
    return sum_entries(stage.block_specs(tp), tp, shard, stage.ep)


@lru_cache(maxsize=65_536)
def rest_entries(stage: Stage, tp: int, shard: int) -> Entries:
    """Entries of a stage's parameters outside of its blocks."""
    return sum_entries(stage.rest_specs(), tp, shard)


class OuterUnits(NamedTuple):
    """Local entries of the units of full sharding outside the blocks; `rest` is what is no unit alone."""

    embedding: int
    head: int
    rest: int


@lru_cache(maxsize=65_536)
def outer_units(stage: Stage, tp: int) -> OuterUnits:
    """Units of a stage outside its blocks."""
    entries = {name: sum_entries({name: spec}, tp, 1).local for name, spec in stage.rest_specs().items()}
    alone = {name: entries.pop(name) for name in stage.lone_units}
    return OuterUnits(alone.get(EMBEDDING, 0), alone.get(HEAD, 0), sum(entries.values()))
