"""Mesh of a run: its parallel axes, and the replica groups of ranks on each axis, as pure data.

The module uses no device and no process group, so one process can build the mesh of rank 3001 of 4096. Ranks are
ordered as [pp, dp, cp, tp], tensor parallel fastest, so that ranks that communicate most are on neighbouring cores. NxD
and Megatron-LM use the same order. A machine with other wiring may require a different order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, product

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.text import listed


@dataclass(frozen=True)
class Axis:
    """One parallel axis of a mesh, from the view of one rank.

    Args:
        name: Name of the axis, such as `tp`.
        rank: This rank's index inside its replica group.
        groups: All replica groups of the axis, each a tuple of global ranks. Each rank is in exactly one group.
        spans_stages: A group contains ranks of several pipeline stages, which run different programs.
    """

    name: str
    rank: int
    groups: tuple[tuple[int, ...], ...] = field(repr=False)
    spans_stages: bool = False

    @property
    def size(self) -> int:
        """Number of ranks in each replica group."""
        return len(self.groups[0])

    def neighbours(self, size: int) -> Axis:
        """Axis whose groups are `size` adjacent ranks of this axis, such as ranks with the same replicated K/V head."""
        assert self.size % size == 0, (self, size)
        groups: list[tuple[int, ...]] = []
        for group in self.groups:
            groups += [group[i : i + size] for i in range(0, len(group), size)]
        return Axis(f"{self.name}/{size}", self.rank % size, tuple(groups))

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Replica group that contains a global rank."""
        return next(group for group in self.groups if rank in group)

    def pairs(self, peer: int) -> Axis:
        """Axis of size 2 that pairs this rank with the ring neighbour at index `peer`.

        The indices form a ring of even size. Its edges form two perfect matchings: edges that begin at even indices,
        and edges that begin at odd indices. The lower index comes first in each pair.
        """
        size = self.size
        assert size % 2 == 0, f"{self.name} has {size} positions, and an odd ring has no perfect matching"
        assert (self.rank - peer) % size in (1, size - 1), f"{self.rank} and {peer} of {size} are not neighbours"
        low, high = sorted((self.rank, peer))
        begins = low if high - low == 1 else high
        edges = [sorted((i, (i + 1) % size)) for i in range(begins % 2, size, 2)]
        groups: list[tuple[int, ...]] = []
        for group in self.groups:
            groups += [(group[low], group[high]) for low, high in edges]
        first, second = edges[0]
        return Axis(f"{self.name}:{first}-{second}", int(self.rank > peer), tuple(groups), self.spans_stages)


@dataclass(frozen=True)
class StateAxes:
    """Axes of the ranks that hold the training state (parameters, gradients, optimizer state) of a parameter.

    Args:
        copies: Ranks that hold the same tensor parallel shard of the parameter, and sum its gradients.
        shard: Ranks of `copies` among which the training state is sharded.
        replica: Ranks of `copies` that hold the same training state.
    """

    copies: Axis
    shard: Axis
    replica: Axis


@dataclass(frozen=True)
class Mesh:
    """Parallel axes of a run from the view of one rank: pipeline, data, context, tensor and expert parallel.

    The ranks of dp x cp hold the same parameters, and their gradients are summed. Training state is sharded over these
    ranks.

    Under expert parallelism, `ep_size` adjacent ranks of dp x cp hold different experts. Ranks at the same position of
    their ep groups hold the same experts.

    Args:
        world: Number of ranks.
        rank: This rank, 0 <= rank < world.
        pp_size, dp_size, cp_size, tp_size: Degrees; their product is `world`.
        shard_size: Number of adjacent ranks of dp x cp among which training state is sharded; divides `dp_size *
            cp_size`.
        order: All ranks in the order of the mesh [pp, dp, cp, tp]; empty for ascending order.
        ep_size: Number of adjacent ranks of dp x cp among which experts are divided; divides `dp_size * cp_size`, and
            `shard_size` if above 1.
    """

    world: int
    rank: int
    pp_size: int = 1
    dp_size: int = 1
    tp_size: int = 1
    shard_size: int = 1
    cp_size: int = 1
    order: tuple[int, ...] = field(default=(), repr=False)
    ep_size: int = 1

    @staticmethod
    def build(  # 9 arguments: the degrees of a run
        world: int,
        rank: int,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 0,
        cp: int = 1,
        ep: int = 1,
        shard: int = 1,
        order: tuple[int, ...] = (),
    ) -> Mesh:
        """Build the mesh of a rank; `dp=0` derives dp from the other degrees, `shard=0` shards over all of dp x cp.

        Raises:
            ConfigError: The degrees do not fit the world size.
        """
        problems = []
        model = tp * cp * pp
        if world % model:
            key = "parallel.pp"
            if tp > 1:
                key = "parallel.tp"
            elif cp > 1:
                key = "parallel.cp"
            degrees, among = f"tp={tp} x pp={pp}", "tp x pp"
            if cp > 1:
                degrees, among = f"tp={tp} x cp={cp} x pp={pp}", "tp x cp x pp"
            problems.append(
                Problem(
                    key,
                    f"{degrees} = {model} does not divide the world of {world} ranks",
                    hint=f"start a multiple of {model} ranks (`nxtrain launch` starts as many as needed), "
                    f"or choose {among} among {divisors(world)}",
                )
            )
        elif dp and dp * model != world:
            degrees = f"tp={tp} x pp={pp} x dp={dp}"
            if cp > 1:
                degrees = f"tp={tp} x cp={cp} x pp={pp} x dp={dp}"
            problems.append(
                Problem(
                    "parallel.dp",
                    f"{degrees} = {model * dp} ranks, but the world has {world}",
                    hint=f"use dp={world // model}, or dp=0 to derive it",
                )
            )
        else:
            problems += _problems_of_copies(world // (tp * pp), cp, ep, shard)
        if problems:
            raise ConfigError(problems)
        assert not order or sorted(order) == list(range(world)), "an order has every rank once"
        dp = world // model
        return Mesh(world, rank, pp, dp, tp, shard or dp * cp, cp, order, ep)

    @cached_property
    def pp(self) -> Axis:
        """Pipeline parallel axis: the stages of one model replica."""
        return self.over("pp")

    @cached_property
    def dp(self) -> Axis:
        """Data parallel axis: the ranks that read different sequences."""
        return self.over("dp")

    @cached_property
    def cp(self) -> Axis:
        """Context parallel axis: the ranks that share the positions of each sequence."""
        return self.over("cp")

    @cached_property
    def dp_cp(self) -> Axis:
        """Data and context parallel axes together: the ranks that hold copies of one shard and sum its gradients."""
        return self.over("dp", "cp")

    @cached_property
    def shard(self) -> Axis:
        """Axis of the ranks of dp x cp among which training state is sharded."""
        return self.over("shard")

    @cached_property
    def replica(self) -> Axis:
        """Axis of the ranks of dp x cp that hold the same training state."""
        return self.over("replica")

    @cached_property
    def ep(self) -> Axis:
        """Expert parallel axis: the ranks of dp x cp that hold different experts."""
        return self.over("ep")

    @cached_property
    def dense(self) -> StateAxes:
        """Axes of parameters that all ranks of dp x cp hold, which are all parameters outside of experts."""
        return StateAxes(self.dp_cp, self.shard, self.replica)

    @cached_property
    def experts(self) -> StateAxes:
        """Axes of the parameters of experts."""
        if self.ep_size == 1:
            return self.dense
        return StateAxes(self.over("expert_copies"), self.over("expert_shard"), self.over("expert_replica"))

    @cached_property
    def tp(self) -> Axis:
        """Tensor parallel axis: the ranks that shard each layer."""
        return self.over("tp")

    @cached_property
    def model(self) -> Axis:
        """Pipeline, expert and tensor parallel axes together: the ranks that hold one replica of the whole model."""
        return self.over("pp", "ep", "tp")

    @cached_property
    def batch(self) -> Axis:
        """Pipeline, data and context parallel axes together: the ranks that process one global batch."""
        return self.over("pp", "dp", "cp")

    @cached_property
    def state(self) -> Axis:
        """Axis of the ranks that together hold one copy of the training state; shard groups contain whole ep groups."""
        holds_all = self.shard_size == 1 and self.ep_size > 1
        return self.over("pp", "ep" if holds_all else "shard", "tp")

    @cached_property
    def stage(self) -> Axis:
        """Axis of the ranks of one pipeline stage, which run the same program."""
        return self.over("dp", "cp", "tp")

    @cached_property
    def all(self) -> Axis:
        """Axis of all ranks."""
        return self.over("pp", "dp", "cp", "tp")

    def rank_name(self, rank: int) -> str:
        """Name of a rank for messages, with its pipeline stage if there are several stages."""
        if self.pp_size == 1:
            return f"rank {rank}"
        return f"pipeline stage {self.pp.group_of(rank).index(rank)} of {self.pp_size} (rank {rank})"

    def stages_held(self, first: int, count: int) -> tuple[int, ...]:
        """Pipeline stages on a machine with `count` ranks from `first` on, ascending; empty if the machine has all."""
        ranks = set(range(first, first + count))
        held = tuple(stage for stage, group in enumerate(self.stage.groups) if not ranks.isdisjoint(group))
        return held if len(held) < self.pp_size else ()

    def over(self, *names: str) -> Axis:
        """Axis over the product of the named axes: `over("pp", "tp")` groups ranks that differ only in pp and tp."""
        tp = self.tp_size
        cp = self.cp_size
        shard = self.shard_size
        ep = self.ep_size
        copies, expert_shard = self.dp_size * cp, max(1, shard // ep)
        # Size of each axis, and the distance between its neighbours in the order of the mesh.
        axes = {
            "pp": (self.pp_size, copies * tp),
            "dp": (self.dp_size, cp * tp),
            "cp": (cp, tp),
            "replica": (copies // shard, shard * tp),
            "shard": (shard, tp),
            "expert_copies": (copies // ep, ep * tp),
            "expert_replica": (copies // (expert_shard * ep), expert_shard * ep * tp),
            "expert_shard": (expert_shard, ep * tp),
            "ep": (ep, tp),
            "tp": (tp, 1),
        }
        spanned = [axes[name] for name in names]
        members, index = [0], 0
        order = self.order or range(self.world)
        own = order.index(self.rank)
        for size, stride in spanned:
            members = [base + i * stride for base, i in product(members, range(size))]
            index = index * size + own // stride % size
        groups = []
        for first in range(self.world):
            if not any(first // stride % size for size, stride in spanned):
                groups.append(tuple(order[first + member] for member in members))
        unused = {name for name in ("cp", "ep") if axes[name][0] == 1 and len(names) > 1}
        name = "x".join(name for name in names if name not in unused)
        return Axis(name, index, tuple(groups), "pp" in names and self.pp_size > 1)


def _problems_of_copies(copies: int, cp: int, ep: int, shard: int) -> list[Problem]:
    """Problems of `shard_size` and `ep` for a mesh whose dp x cp has `copies` ranks."""
    replicas = f"dp={copies}" if cp == 1 else f"dp x cp={copies}"
    problems = []
    if shard and copies % shard:
        reason = f"{shard} does not divide {replicas}"
        problems.append(Problem("parallel.shard_size", reason, hint=f"use one of {listed(divisors(copies))}"))
    elif shard > 1 and shard % ep:
        reason = f"ep={ep} does not divide the {shard} ranks that share state, and an expert's copies would differ"
        works = [size for size in divisors(copies) if size % ep == 0]
        hint = "use parallel.ep=1"
        if works:
            hint = f"use one of {listed(works)}, or parallel.ep among {listed(divisors(shard))}"
        problems.append(Problem("parallel.shard_size", reason, hint=hint))
    if copies % ep:
        reason = f"{ep} does not divide {replicas}, the ranks that experts are divided between"
        problems.append(Problem("parallel.ep", reason, hint=f"use one of {listed(divisors(copies))}"))
    return problems


def divisors(n: int) -> list[int]:
    """Divisors of a number, in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def spans(ranks: Sequence[int]) -> str:
    """Format ascending numbers as ranges, such as `0-2, 5`."""
    texts: list[str] = []
    for _, run in groupby(enumerate(ranks), key=lambda item: item[1] - item[0]):
        numbers = [rank for _, rank in run]
        if len(numbers) == 1:
            texts.append(str(numbers[0]))
        else:
            texts.append(f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(texts)
