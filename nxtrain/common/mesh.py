"""Parallel axes of a run, and the replica groups of ranks on each, as pure data.

The module touches no device and no process group, so one process can hold the mesh of rank 3001 of 4096. Ranks are
laid out as [pp, dp, tp], tensor parallel fastest, so that the ranks that communicate most are the nearest cores. NxD
and Megatron-LM use the same order. A machine with other wiring gives a different order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from nxtrain.common.errors import ConfigError, Problem

SHOWN_NUMBERS = 24
"""Most numbers that a message lists."""


@dataclass(frozen=True)
class Axis:
    """One parallel dimension of a run, seen from one rank.

    Args:
        rank: This rank's index inside its replica group.
        groups: Every replica group of the axis, each a tuple of global ranks; together they hold each rank once.
        spans_stages: A group has ranks of several pipeline stages, which run different programs.
    """

    name: str
    rank: int
    groups: tuple[tuple[int, ...], ...] = field(repr=False)
    spans_stages: bool = False

    @property
    def size(self) -> int:
        """Ranks in each replica group."""
        return len(self.groups[0])

    def neighbours(self, size: int) -> Axis:
        """Axis of `size` adjacent ranks inside each group, such as those that share a replicated key/value head."""
        assert self.size % size == 0, (self, size)
        groups: list[tuple[int, ...]] = []
        for group in self.groups:
            groups += [group[i : i + size] for i in range(0, len(group), size)]
        return Axis(f"{self.name}/{size}", self.rank % size, tuple(groups))

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Replica group of a global rank."""
        return next(group for group in self.groups if rank in group)

    def pairs(self, peer: int) -> Axis:
        """Axis of size two that joins this rank and the neighbour at index `peer`.

        Indices form a ring of even size. The ring's edges form two perfect matchings. One has the edges that begin at
        even indices; the other has those that begin at odd indices, with the edge from the last to the first. In a pair
        the lower index comes first, so that all ranks of an index have the same rank in their pair.
        """
        size = self.size
        assert size % 2 == 0, f"{self.name} has {size} positions, and an odd ring has no perfect matching"
        assert (self.rank - peer) % size in (1, size - 1), f"{self.rank} and {peer} of {size} are no neighbours"
        low, high = sorted((self.rank, peer))
        begins = low if high - low == 1 else high
        edges = [sorted((i, (i + 1) % size)) for i in range(begins % 2, size, 2)]
        groups: list[tuple[int, ...]] = []
        for group in self.groups:
            groups += [(group[low], group[high]) for low, high in edges]
        first, second = edges[0]
        return Axis(f"{self.name}:{first}-{second}", int(self.rank > peer), tuple(groups), self.spans_stages)


@dataclass(frozen=True)
class Mesh:
    """Axes of one rank: pipeline, data and tensor parallel, and products of them.

    Args:
        rank: This rank, 0 <= rank < world.
        pp_size, dp_size, tp_size: Degrees; their product is `world`.
        shard_size: Adjacent data parallel ranks that shard training state between them; divides `dp_size`.
        order: Every rank once, in the order of the mesh [pp, dp, tp]; empty for ascending.
    """

    world: int
    rank: int
    pp_size: int = 1
    dp_size: int = 1
    tp_size: int = 1
    shard_size: int = 1
    order: tuple[int, ...] = field(default=(), repr=False)

    @staticmethod
    def build(
        world: int, rank: int, *, tp: int = 1, pp: int = 1, dp: int = 0, shard: int = 1, order: tuple[int, ...] = ()
    ) -> Mesh:
        """Lay out a world; `dp=0` derives dp from tp and pp, `shard=0` shards state over all of dp."""
        problems = []
        if world % (tp * pp):
            problems.append(
                Problem(
                    "parallel.tp" if tp > 1 else "parallel.pp",
                    f"tp={tp} x pp={pp} = {tp * pp} does not divide the world of {world} ranks",
                    hint=f"start a multiple of {tp * pp} ranks (`nxtrain launch` starts as many as needed), "
                    f"or choose tp x pp among {divisors(world)}",
                )
            )
        elif dp and dp * tp * pp != world:
            problems.append(
                Problem(
                    "parallel.dp",
                    f"tp={tp} x pp={pp} x dp={dp} = {tp * pp * dp} ranks, but the world has {world}",
                    hint=f"use dp={world // (tp * pp)}, or dp=0 to derive it",
                )
            )
        elif shard and world // (tp * pp) % shard:
            problems.append(
                Problem(
                    "parallel.shard_size",
                    f"{shard} does not divide dp={world // (tp * pp)}",
                    hint=f"use one of {divisors(world // (tp * pp))}",
                )
            )
        if problems:
            raise ConfigError(problems)
        assert not order or sorted(order) == list(range(world)), "an order has every rank once"
        dp = world // (tp * pp)
        return Mesh(world, rank, pp, dp, tp, shard or dp, order)

    @cached_property
    def pp(self) -> Axis:
        """Pipeline parallel axis: the stages of one model copy."""
        return self.over("pp")

    @cached_property
    def dp(self) -> Axis:
        """Data parallel axis: the copies of one shard."""
        return self.over("dp")

    @cached_property
    def shard(self) -> Axis:
        """Data parallel ranks that shard training state between them."""
        return self.over("shard")

    @cached_property
    def replica(self) -> Axis:
        """Data parallel ranks that hold the same training state."""
        return self.over("replica")

    @cached_property
    def tp(self) -> Axis:
        """Tensor parallel axis: the shards of one layer."""
        return self.over("tp")

    @cached_property
    def model(self) -> Axis:
        """Pipeline and tensor parallel axes together: the ranks that hold one copy of the whole model."""
        return self.over("pp", "tp")

    @cached_property
    def batch(self) -> Axis:
        """Pipeline and data parallel axes together: the ranks that share the work on a global batch."""
        return self.over("pp", "dp")

    @cached_property
    def state(self) -> Axis:
        """Ranks that together hold one copy of the training state."""
        return self.over("pp", "shard", "tp")

    @cached_property
    def stage(self) -> Axis:
        """Ranks of one pipeline stage, which run the same program."""
        return self.over("dp", "tp")

    @cached_property
    def all(self) -> Axis:
        """Axis of all ranks."""
        return self.over("pp", "dp", "tp")

    def words(self, rank: int) -> str:
        """Name of a rank in messages, with its pipeline stage if there are several."""
        if self.pp_size == 1:
            return f"rank {rank}"
        return f"pipeline stage {self.pp.group_of(rank).index(rank)} of {self.pp_size} (rank {rank})"

    def stages_held(self, first: int, count: int) -> tuple[int, ...]:
        """Pipeline stages of a machine that has `count` ranks from `first` on, ascending; empty if all."""
        ranks = set(range(first, first + count))
        held = tuple(stage for stage, group in enumerate(self.stage.groups) if not ranks.isdisjoint(group))
        return held if len(held) < self.pp_size else ()

    @cached_property
    def _index(self) -> int:
        """Index of this rank in the mesh [pp, dp, tp]."""
        return self.order.index(self.rank) if self.order else self.rank

    def over(self, *names: str) -> Axis:
        """Axis that spans the named axes; `over("pp", "tp")` groups the ranks that differ only in pp and tp."""
        replicas = self.dp_size // self.shard_size
        sizes = {"pp": self.pp_size, "replica": replicas, "shard": self.shard_size, "tp": self.tp_size}
        parts = set(names)
        if "dp" in parts:
            parts |= {"replica", "shard"}
        # Indices in the mesh: of the first group's members, and of the first member of each group.
        members, starts = [0], [0]
        index, stride = 0, self.world
        for part, size in sizes.items():
            stride //= size
            if part in parts:
                members = _spread(members, size, stride)
                index += stride * (self._index // stride % size)
            else:
                starts = _spread(starts, size, stride)
        groups: list[tuple[int, ...]] = []
        for start in starts:
            group = [start + member for member in members]
            if self.order:
                group = [self.order[i] for i in group]
            groups.append(tuple(group))
        return Axis("x".join(names), members.index(index), tuple(groups), "pp" in names and self.pp_size > 1)


def _spread(indices: Sequence[int], size: int, stride: int) -> list[int]:
    """Indices with `size` multiples of a stride added to each, in order."""
    spread: list[int] = []
    for index in indices:
        spread += range(index, index + size * stride, stride)
    return spread


def divisors(n: int) -> list[int]:
    """Divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def listed(numbers: Sequence[int]) -> str:
    """Text of numbers in a message: the first `SHOWN_NUMBERS`, and the count of the others."""
    more = f" and {len(numbers) - SHOWN_NUMBERS} more" if len(numbers) > SHOWN_NUMBERS else ""
    return ", ".join(map(str, numbers[:SHOWN_NUMBERS])) + more


def spans(ranks: Sequence[int]) -> str:
    """Text of ascending numbers, with runs as ranges: 0-2, 5."""
    texts: list[str] = []
    for _, run in groupby(enumerate(ranks), key=lambda item: item[1] - item[0]):
        numbers = [rank for _, rank in run]
        if len(numbers) == 1:
            texts.append(str(numbers[0]))
        else:
            texts.append(f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(texts)
