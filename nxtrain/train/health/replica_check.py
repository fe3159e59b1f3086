"""Silent data corruption check: a vote on checksums of replicated state finds the rank whose memory changed.

The vote compares the bits of all parameters and of the optimizer state wherever several ranks hold equal values:

- Data parallel replicas. With shard=none they hold the whole state, and with shard=zero1 the parameters. With
  shard=hybrid they hold the same shards as the other groups, and with grad_op and full nothing. The replicas of experts
  are the ranks that hold the same experts.
- Tensor parallel ranks: norm weights, and the K/V heads that several ranks share, for every value of shard.
- The first and the last pipeline stage: a tied embedding, for every value of shard.

A vote cannot see corruption of a value that only one rank holds. Nor can it see a corrupted value that the next step
overwrites before the next vote.

Shapes: R ranks that hold equal values, P tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nxtrain.backends.rounding import folded, mix_
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.train.step import TrainState


@dataclass(frozen=True)
class ReplicaMismatch:
    """Tensors in which a minority of ranks differs from the other ranks.

    Args:
        ranks: Ranks in the minority; all compared ranks if no value has a majority.
        others: Ranks of the majority.
        tensors: Names of the tensors.
    """

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        tensors = self.tensors[0]
        if len(self.tensors) > 1:
            tensors += f" and {len(self.tensors) - 1} more tensors"
        if not self.others:
            return f"{_listed(self.ranks)} differ in {tensors}, and no majority tells which is right"
        differ = "differs" if len(self.ranks) == 1 else "differ"
        return f"{_listed(self.ranks)} {differ} from {_listed(self.others)} in {tensors}"

    @property
    def first(self) -> int:
        """Lowest of the compared ranks."""
        return min(self.ranks + self.others)


@dataclass(frozen=True, order=True)
class Holders:
    """Description of the ranks that hold equal copies of a tensor, by axes of the mesh.

    Args:
        tied: True if the first and the last pipeline stage both hold the tensor.
        copies: Number of adjacent tensor parallel ranks that hold the tensor.
        replicas: Number of data parallel replicas of the tensor or of its shard.
        expert: The tensor belongs to experts, whose replicas are on other ranks than the replicas of other tensors.
    """

    tied: bool
    copies: int
    replicas: int
    expert: bool = False

    def ranks(self, mesh: Mesh, replicas: Axis) -> tuple[int, ...]:
        """Ranks that hold the tensor, in the order of the checksums from `ReplicaCheck.gather`."""
        of_replicas: tuple[int, ...] = (mesh.rank,)
        if self.replicas > 1:
            of_replicas = replicas.group_of(mesh.rank)
        tp = mesh.tp.neighbours(self.copies)
        holders: list[int] = []
        for index in range(self.copies):
            holders += [tp.group_of(rank)[index] for rank in of_replicas]
        if self.tied:
            holders += [mesh.pp.group_of(rank)[_other_end(mesh)] for rank in holders]
        return tuple(holders)


class ReplicaCheck:
    """Comparison of this rank's tensors with their replicas on other ranks; the tensors' storage must stay in place.

    Attributes:
        ballots: Names of the tensors that each set of holders compares.
    """

    def __init__(self, state: TrainState) -> None:
        self._state, self._mesh = state, state.mesh
        self._is_whole = state.data_parallel.has_whole_parameters
        held = sorted(self._held(), key=lambda holders_and_part: holders_and_part[0])
        self._tensors = {part.name: part.tensor for _, part in held}
        self.ballots: dict[Holders, list[str]] = {}
        for holders, part in held:
            self.ballots.setdefault(holders, []).append(part.name)
        devices = [shard.device for shard in state.data_parallel.shards.values()]
        device = devices[0] if devices else state.backend.device  # a stage may have frozen parameters alone
        self._kernels = state.backend.kernels
        put: Callable[[Tensor], Tensor] = state.backend.put
        if device != state.backend.device:
            self._kernels = state.backend.host_kernels
            put = torch.Tensor.clone
        self._rows = {part.name: put(part.rows) for _, part in held if part.rows is not None}
        longest = max((max(t.shape[0], t.shape[1:].numel()) for t in self._tensors.values()), default=1)
        self._factors = put(factors(longest))
        self._nothing = state.backend.put(torch.zeros(2))

    @property
    def is_possible(self) -> bool:
        """True if some ranks may hold replicas; equal on all ranks.

        With several stages it is always True, since a stage does not know which parameters other stages tie.
        """
        return bool(self.ballots) or self._mesh.pp_size > 1

    @torch.no_grad()
    def gather(self) -> tuple[list[Tensor], Tensor]:
        """Gather the checksums of all holders, and count those that differ.

        Returns:
            (R, P) int32 for each entry of `ballots`, and the number of differing checksums over all ranks, () float32.
        """
        collectives, mesh = self._state.backend.collectives, self._mesh
        of_all: list[Tensor] = []
        if self.ballots:
            sums = checksums(self._tensors, self._kernels, self._factors, self._rows).to(self._state.backend.device)
            parts = sums.unsqueeze(0).split([len(names) for names in self.ballots.values()], dim=1)
            for holders, part in zip(self.ballots, self._over_replicas(parts), strict=True):
                tp = mesh.tp.neighbours(holders.copies)
                of_all.append(collectives.all_gather(part.clone(), tp) if holders.copies > 1 else part)
            of_all = self._over_ends(of_all)
        differing = self._nothing.sum()
        for of_holders in of_all:
            differing = differing + (of_holders != of_holders[:1]).sum(dtype=torch.float32)
        return of_all, collectives.all_reduce(differing, mesh.state)

    def mismatches(self, of_all: Sequence[Tensor]) -> list[ReplicaMismatch]:
        """Differing ranks and tensors, from the gathered checksums, which are copied to the host."""
        tensors: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
        for (holders, names), sums in zip(self.ballots.items(), of_all, strict=True):
            ranks = holders.ranks(self._mesh, self._replicas(expert=holders.expert))
            for name, column in zip(names, sums.cpu().T.tolist(), strict=True):
                sides = minority(ranks, column)
                if sides is not None:
                    tensors.setdefault(sides, []).append(name)
        return [ReplicaMismatch(apart, others, tuple(names)) for (apart, others), names in tensors.items()]

    def _replicas(self, *, expert: bool) -> Axis:
        """Axis of the ranks that hold equal parameters, or equal shards of parameters."""
        axes = self._mesh.experts if expert else self._mesh.dense
        return axes.copies if self._is_whole else axes.replica

    def _over_replicas(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Gather checksums over data parallel replicas: (1, P) of this rank to (R, P), for each group of holders.

        One collective serves all groups without experts, and one more serves the groups with experts.
        """
        gathered = dict(zip(self.ballots, sums, strict=True))
        for expert in (False, True):
            of_replicas = [holders for holders in self.ballots if holders.replicas > 1 and holders.expert == expert]
            if not of_replicas:
                continue
            mine = torch.cat([gathered[holders] for holders in of_replicas], dim=1)
            of_all = self._state.backend.collectives.all_gather(mine, self._replicas(expert=expert))
            parts = of_all.split([gathered[holders].shape[1] for holders in of_replicas], dim=1)
            gathered.update(zip(of_replicas, parts, strict=True))
        return list(gathered.values())

    def _over_ends(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Append the checksums of tied tensors from the other end of the pipeline, in one exchange."""
        tied = [part for holders, part in zip(self.ballots, parts, strict=True) if holders.tied]
        if not tied:
            return list(parts)
        mine, pp = torch.cat([part.flatten() for part in tied]), self._mesh.pp
        theirs = self._state.backend.collectives.exchange(mine, pp, _other_end(self._mesh))
        others = iter(theirs.split([part.numel() for part in tied]))
        return [
            torch.cat([part, next(others).view(part.shape)]) if holders.tied else part
            for holders, part in zip(self.ballots, parts, strict=True)
        ]

    def _held(self) -> Iterator[tuple[Holders, _Part]]:
        """Parameters and optimizer state that other ranks hold too, whole or as shards.

        With shard=zero1, no other data parallel rank holds this rank's rows of the optimizer state.
        """
        state = self._state
        shards = state.data_parallel.shards
        if self._is_whole:
            parameters = {name: parameter.detach() for name, parameter in state.model.named_parameters()}
            yield from _parts("", parameters, Layout(ParamTable.of(state.model), replace(self._mesh, shard_size=1)))
        else:
            yield from _parts("", shards, state.layout)
        for kind, tensors in state.optimizer.state.items():
            others = {name: tensor for name, tensor in tensors.items() if tensor is not shards[name]}
            yield from _parts(f"{kind} of ", others, state.layout)


@dataclass(frozen=True)
class _Part:
    """Rows of a tensor that the same set of ranks holds.

    Args:
        name: Name in messages, equal for all holders.
        tensor: The tensor with all its rows.
        rows: (rows,) int32, 1 for each row that counts; None if all rows count.
    """

    name: str
    tensor: Tensor
    rows: Tensor | None = None


def _parts(prefix: str, tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[tuple[Holders, _Part]]:
    """Parts of tensors that several ranks hold, with their holders; the same number on all ranks of a stage."""
    for name, tensor in tensors.items():
        spec, replicas = layout.table[name], layout.axes_of(name).replica.size
        is_expert = spec.expert and layout.mesh.ep_size > 1
        numbers = sorted({piece.copies for piece in spec.pieces(layout.mesh.tp)})
        for copies in numbers:
            if not spec.is_tied and copies == replicas == 1:
                continue
            holders = Holders(spec.is_tied, copies, replicas, is_expert)
            named = f"{prefix}{spec.tied_to or name}"
            if len(numbers) == 1:
                yield holders, _Part(named, tensor)
                continue
            rows = torch.tensor(layout.row_copies(name, tensor.shape[0])) == copies
            if copies > 1:
                named += f" ({copies} copies over tp)"
            yield holders, _Part(named, tensor, rows.to(torch.int32))


def _other_end(mesh: Mesh) -> int:
    """Pipeline stage that holds the other replica of a tied parameter, as seen from the first or the last stage."""
    return 0 if mesh.pp.rank else mesh.pp.size - 1


def minority(ranks: Sequence[int], sums: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Ranks in the minority and ranks in the majority, by their checksums; None if all checksums are equal.

    If no checksum has a majority, all ranks are in the minority.
    """
    value, number = Counter(sums).most_common(1)[0]
    if number == len(ranks):
        return None
    is_majority = 2 * number > len(ranks)
    apart = {rank for rank, checksum in zip(ranks, sums, strict=True) if checksum != value or not is_majority}
    return tuple(sorted(apart)), tuple(sorted(set(ranks) - apart))


def checksums(
    tensors: Mapping[str, Tensor], kernels: Kernels, factors: Tensor, counted: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Checksum of each tensor: (P,) int32, independent of the order in which a device adds.

    The bits of each entry, as float32, are multiplied by an odd factor of its row and an odd factor of its column. The
    products are summed modulo 2^32. One flipped bit always changes the sum; swapped entries change it except by chance.
    The bits are folded first, since the product of a highest bit is the same at every position.

    Args:
        tensors: float32 or bfloat16 tensors by name.
        kernels: Split the tensors into tiles and view their bits.
        factors: Result of `factors`, no shorter than any dimension.
        counted: For some tensors, 1 for each row that counts and 0 for other rows: (rows,) int32.
    """
    sums = {name: torch.zeros((), dtype=torch.int32, device=factors.device) for name in tensors}
    for call in kernels.tiles({name: tensor.shape for name, tensor in tensors.items()}):
        for rows in call:
            bits = kernels.bits(rows.of(tensors[rows.name]).float().reshape(rows.number, -1))
            of_rows = (folded(bits) * factors[0, : bits.shape[1]]).sum(dim=1, dtype=torch.int32)
            of_rows = of_rows * factors[1, rows.start : rows.start + rows.number]
            if counted and rows.name in counted:
                of_rows = of_rows * counted[rows.name][rows.start : rows.start + rows.number]
            sums[rows.name] = sums[rows.name] + of_rows.sum(dtype=torch.int32)
    return torch.stack(list(sums.values()))


def factors(longest: int) -> Tensor:
    """Odd factors of columns and rows, for checksums of tensors with dimensions up to `longest`: (2, longest) int32."""
    return mix_(torch.arange(2 * longest, dtype=torch.int32)).view(2, longest) | 1


def _listed(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
