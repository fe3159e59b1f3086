"""Kinds of pipeline stages, and the number of parameters of a stage on one rank."""

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
    """Number of elements in a group of parameters.

    Args:
        local: Elements on a tensor parallel rank.
        rows: Elements in the rows of the first rank that shares training state, padding included.
        largest: Local elements of the largest parameter.
        padded: Local elements of parameters whose rows these ranks cannot share evenly.
        experts: Local elements of experts.
    """

    local: int
    rows: int
    largest: int
    padded: int = 0
    experts: int = 0

    def times(self, number: int) -> Entries:
        """Counts for `number` equal blocks: all counts multiplied, except the largest parameter."""
        largest = self.largest if number else 0
        return Entries(number * self.local, number * self.rows, largest, number * self.padded, number * self.experts)

    def plus(self, other: Entries) -> Entries:
        """Counts for two groups of parameters together."""
        return Entries(
            self.local + other.local,
            self.rows + other.rows,
            max(self.largest, other.largest),
            self.padded + other.padded,
            self.experts + other.experts,
        )


@lru_cache(maxsize=1024)
def axis_of(size: int) -> Axis:
    """Tensor parallel axis of a given size, as seen from its first rank, which holds the most."""
    return Axis("tp", 0, (tuple(range(size)),))


@lru_cache(maxsize=65_536)
def _spec_entries(spec: ShardSpec, tp: int, shard: int) -> Entries:
    """Elements of one parameter: `ShardSpec.local_shape` over tp, and `row_cut` of its first dimension over `shard`."""
    shape = spec.local_shape(axis_of(tp))
    local = math.prod(shape)
    rows = -(-shape[0] // shard) * math.prod(shape[1:])
    padded = local if rows * shard > local else 0
    return Entries(local, rows, local, padded, local if spec.expert else 0)


def sum_entries(specs: Mapping[str, ShardSpec], tp: int, shard: int, ep: int = 1) -> Entries:
    """Number of elements of some parameters that a rank holds, summed over the parameters.

    Args:
        specs: Sharding of each parameter.
        tp: Number of tensor parallel ranks.
        shard: Number of ranks that shard the rows of every parameter, except experts.
        ep: Number of ranks that divide the experts; every `ep`-th of the `shard` ranks has the same experts.
    """
    total = Entries(0, 0, 0)
    for spec in specs.values():
        rows = max(1, shard // ep) if spec.expert else shard
        total = total.plus(_spec_entries(spec, tp, rows))
    return total


@dataclass(frozen=True)
class Stage:
    """Kind of pipeline stage; stages of one kind have the same parameters.

    Args:
        dimensions: Dimensions of the model.
        blocks: Number of blocks of each chunk.
        first, last: The rank has the embedding, and the output projection.
        fused_qkv, fused_gate_up: As in `[model]`.
        ep: Number of ranks that divide the experts of a block.
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
        """Number of blocks of all chunks."""
        return sum(self.blocks)

    @property
    def dense(self) -> Stage:
        """Same stage for a model in which no block has experts."""
        return replace(self, dimensions=self.dimensions.dense, ep=1, num_dense=0)

    def block_specs(self, tp: int, ep_rank: int = 0) -> dict[str, ShardSpec]:
        """Sharding of a block's parameters, by name inside the block; of a block with experts, if the model has any.

        Args:
            tp: Number of tensor parallel ranks.
            ep_rank: Position of the rank among the ranks that divide the experts.
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
        """Sharding of the parameters outside the blocks, by name."""
        return rest_specs(self.dimensions, first=self.first, last=self.last)

    @property
    def lone_units(self) -> tuple[str, ...]:
        """Parameters that full sharding gathers separately: embedding and output projection, unless they are tied."""
        if self.first and self.last and self.dimensions.tied:
            return ()
        names = (EMBEDDING,) if self.first else ()
        return (*names, HEAD) if self.last else names


@lru_cache(maxsize=1024)
def stage_parts(
    dimensions: Dimensions, seq_len: int, pp: int, virtual_pp: int, cuts: tuple[int, ...] = ()
) -> list[tuple[StagePart, ...]]:
    """Parts of the model on every pipeline rank, as `train/build.py` assigns them."""
    if cuts:
        parts = split_layers_at(dimensions.num_layers, cuts)
    else:
        parts = split_layers(dimensions.num_layers, pp * virtual_pp, dimensions.layer_costs(seq_len))
    return [parts[rank::pp] for rank in range(pp)]


@lru_cache(maxsize=1024)
def pipeline_stages(shape: Stage, seq_len: int, pp: int, virtual_pp: int, cuts: tuple[int, ...]) -> tuple[Stage, ...]:
    """Description of every pipeline rank's stage; `shape` has the properties that all stages share."""
    stages = []
    for parts in stage_parts(shape.dimensions, seq_len, pp, virtual_pp, cuts):
        blocks = tuple(len(part.blocks) for part in parts)
        first, last = any(part.first for part in parts), any(part.last for part in parts)
        num_dense = sum(index in part.blocks for part, index in product(parts, shape.dimensions.dense_layers))
        stages.append(replace(shape, blocks=blocks, first=first, last=last, num_dense=num_dense))
    return tuple(stages)


@lru_cache(maxsize=65_536)
def stage_entries(stage: Stage, tp: int, shard: int) -> Entries:
    """Number of elements of all parameters of a stage."""
    blocks = block_entries(stage, tp, shard).times(stage.num_blocks - stage.num_dense)
    dense = block_entries(stage.dense, tp, shard).times(stage.num_dense)
    return blocks.plus(dense).plus(rest_entries(stage, tp, shard))


@lru_cache(maxsize=65_536)
def block_entries(stage: Stage, tp: int, shard: int) -> Entries:
    """Number of elements of one block's parameters; in a model with experts, of a block with experts."""
    return sum_entries(stage.block_specs(tp), tp, shard, stage.ep)


@lru_cache(maxsize=65_536)
def rest_entries(stage: Stage, tp: int, shard: int) -> Entries:
    """Number of elements of a stage's parameters outside of its blocks."""
    return sum_entries(stage.rest_specs(), tp, shard)


class OuterUnits(NamedTuple):
    """Elements per tp rank of the full-sharding units outside the blocks; `rest` has no separate unit."""

    embedding: int
    head: int
    rest: int


@lru_cache(maxsize=65_536)
def outer_units(stage: Stage, tp: int) -> OuterUnits:
    """Elements of the units of full sharding outside a stage's blocks."""
    entries = {name: sum_entries({name: spec}, tp, 1).local for name, spec in stage.rest_specs().items()}
    alone = {name: entries.pop(name) for name in stage.lone_units}
    return OuterUnits(alone.get(EMBEDDING, 0), alone.get(HEAD, 0), sum(entries.values()))
