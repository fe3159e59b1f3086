"""Division of a model's layers into pipeline stages, balanced by cost or as configured, as pure data.

A model with `pp` stages and `virtual_pp` chunks on each is split into pp * virtual_pp parts, the virtual stages. Stage
r has parts r, r + pp, r + 2 pp and so on. The output of each part is the input of the next part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StagePart:
    """A range of consecutive blocks that a pipeline stage computes as one unit.

    Args:
        blocks: Indices of the blocks.
        first: The part begins with the embedding.
        last: The part ends with the output projection.
    """

    blocks: range
    first: bool
    last: bool


@dataclass(frozen=True)
class LayerCosts:
    """Forward operations per token of the embedding, of one block and of the output projection."""

    embedding: int
    block: int
    head: int


def split_layers(num_blocks: int, num_parts: int, costs: LayerCosts) -> tuple[StagePart, ...]:
    """Split a model into parts of at least one block each, minimizing the cost of the most expensive part.

    Of equally good splits, choose the one with more blocks in later parts, which keep fewer micro-batches in flight.
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
    """Split a model into parts before the blocks with the given indices, ascending."""
    bounds = [0, *cuts, num_blocks]
    last = len(cuts)
    return tuple(StagePart(range(bounds[i], bounds[i + 1]), first=i == 0, last=i == last) for i in range(last + 1))


def units_of(sizes: Sequence[int], fewest: int) -> list[range]:
    """Group adjacent blocks into sharding units of at least `fewest` parameters; a rest joins the previous unit."""
    units: list[range] = []
    start = held = 0
    for index, size in enumerate(sizes):
        held += size
        if held >= fewest:
            units.append(range(start, index + 1))
            start, held = index + 1, 0
    if start < len(sizes):
        units.append(range(units.pop().start if units else 0, len(sizes)))
    return units
