"""Which layers of a model each pipeline stage computes: pure data, balanced by cost or cut as configured.

A model with `pp` ranks per copy and `virtual_pp` chunks on each is cut into pp * virtual_pp parts, the virtual stages.
Rank r of the pipeline has parts r, r + pp, r + 2 pp ...: what one chunk computes, the next rank's chunk continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StagePart:
    """A run of consecutive layers.

    Args:
        blocks: Its transformer blocks, by their index in the whole model.
        first: It begins with the embedding.
        last: It ends with the output projection and the loss.
    """

    blocks: range
    first: bool
    last: bool


@dataclass(frozen=True)
class LayerCosts:
    """What the layers of a model cost, in floating point operations per token of a forward pass.

    Args:
        embedding: Before the blocks.
        block: Each block.
        head: After the blocks.
    """

    embedding: int
    block: int
    head: int


def split_layers(num_blocks: int, num_parts: int, costs: LayerCosts) -> tuple[StagePart, ...]:
    """Cut a model into parts so that the dearest is as cheap as can be; each has a block.

    Of equally good cuts, the one that gives blocks to later parts, which keep fewer micro-batches in flight.
    """
    spent = [costs.block] * num_parts
    spent[0] += costs.embedding
    spent[-1] += costs.head
    sizes = [1] * num_parts
    for _ in range(num_blocks - num_parts):
        cheapest = min(range(num_parts), key=lambda part: (spent[part], -part))
        sizes[cheapest] += 1
        spent[cheapest] += costs.block
    return split_layers_at(num_blocks, [sum(sizes[:part]) for part in range(1, num_parts)])


def split_layers_at(num_blocks: int, cuts: Sequence[int]) -> tuple[StagePart, ...]:
    """Cut a model before given blocks, ascending."""
    bounds = [0, *cuts, num_blocks]
    last = len(cuts)
    return tuple(StagePart(range(bounds[i], bounds[i + 1]), first=i == 0, last=i == last) for i in range(last + 1))
