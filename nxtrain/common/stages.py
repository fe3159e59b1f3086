"""Layers of each pipeline stage as pure data, balanced by cost or split as configured.

A model with `pp` ranks per copy and `virtual_pp` chunks on each is split into pp * virtual_pp parts, the virtual
stages. Rank r of the pipeline has parts r, r + pp, r + 2 pp ...: the output of one part is the input of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StagePart:
    """A run of consecutive layers, which one pipeline stage computes as a unit, with the embedding or the head."""

    blocks: range
    first: bool
    last: bool


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a model's layers before, in and after its blocks, in operations per token of a forward pass."""

    embedding: int
    block: int
    head: int


def split_layers(num_blocks: int, num_parts: int, costs: LayerCosts) -> tuple[StagePart, ...]:
    """Split a model into parts that minimize the cost of the most expensive part. Each part has at least one block.

    Of equally good splits, take the one with more blocks in later parts, which keep fewer micro-batches in flight.
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
    """Split a model before the given blocks, ascending."""
    bounds = [0, *cuts, num_blocks]
    last = len(cuts)
    return tuple(StagePart(range(bounds[i], bounds[i + 1]), first=i == 0, last=i == last) for i in range(last + 1))


def units_of(sizes: Sequence[int], fewest: int) -> list[range]:
    """Group adjacent blocks into units that have enough parameters; too small a rest joins the previous unit."""
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
