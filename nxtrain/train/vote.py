"""Do the data parallel replicas still hold the same? A vote on checksums finds the one whose memory changed by itself.

Compared are the bits of all parameters, and of the optimizer's state where replicas hold the same of it: with
shard=none, and with shard=hybrid between the groups that each hold everything once. With shard=zero1 each rank alone
holds its part of the optimizer's state, and with grad_op and full of the parameters too: what changes there reaches all
replicas alike and no vote can see it. Nor does it see a change that the step after it overwrites before the next vote.

Shapes: R replicas, P tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nxtrain.backends.base import Kernels
from nxtrain.backends.rounding import folded, mix_
from nxtrain.parallel.fully_sharded import FullySharded
from nxtrain.train.step import TrainState


@dataclass(frozen=True)
class Dissent:
    """Tensors in which the same ranks differ from the others.

    Args:
        ranks: Those in the minority; all of them where there is no majority.
        others: The rest.
        tensors: Names.
    """

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.tensors) - 1} more tensors" if len(self.tensors) > 1 else ""
        if not self.others:
            return f"{_listed(self.ranks)} differ in {self.tensors[0]}{more}, and no majority tells which is right"
        differ = "differs" if len(self.ranks) == 1 else "differ"
        return f"{_listed(self.ranks)} {differ} from {_listed(self.others)} in {self.tensors[0]}{more}"


class Vote:
    """The comparison of this rank's replicas.

    Args:
        state: Whose tensors; they must stay where they are.
    """

    def __init__(self, state: TrainState) -> None:
        self._state, mesh = state, state.mesh
        whole = not isinstance(state.data_parallel, FullySharded)
        shards = dict(state.data_parallel.shards)
        self.axis = mesh.dp if whole else mesh.replica
        self._tensors = {name: p.detach() for name, p in state.model.named_parameters()} if whole else shards
        if mesh.replica.size == self.axis.size:
            self._tensors |= {
                f"{kind} of {name}": tensor
                for kind, tensors in state.optimizer.state.items()
                for name, tensor in tensors.items()
                if tensor is not shards[name]
            }
        longest = max(max(t.shape[0], t.shape[1:].numel()) for t in self._tensors.values())
        device = next(iter(self._tensors.values())).device
        self._kernels = state.backend.kernels if device == state.backend.device else state.backend.host_kernels
        put = state.backend.put if device == state.backend.device else torch.Tensor.clone
        self._factors = put(factors(longest))

    @property
    def is_possible(self) -> bool:
        """Whether there is anything to compare."""
        return self.axis.size > 1

    @torch.no_grad()
    def gather(self) -> tuple[Tensor, Tensor]:
        """The checksums of all replicas, (R, P) int32, and how many differ somewhere in the world, () float32."""
        comm, backend = self._state.backend.collectives, self._state.backend
        own = checksums(self._tensors, self._kernels, self._factors).to(backend.device)
        of_all = comm.start_all_gather(own.unsqueeze(0), self.axis).wait()
        differing = (of_all != of_all[:1]).sum(dtype=torch.float32)
        return of_all, comm.all_reduce(differing, self._state.mesh.state)

    def dissents(self, of_all: Tensor) -> list[Dissent]:
        """Who differs in what, read from the device."""
        ranks = self.axis.group_of(self._state.mesh.rank)
        found: dict[tuple[int, ...], list[str]] = {}
        for name, column in zip(self._tensors, of_all.cpu().T.tolist(), strict=True):
            value, number = Counter(column).most_common(1)[0]
            if number == len(ranks):
                continue
            is_majority = 2 * number > len(ranks)
            apart = tuple(r for r, own in zip(ranks, column, strict=True) if own != value or not is_majority)
            found.setdefault(apart, []).append(name)
        return [
            Dissent(apart, tuple(r for r in ranks if r not in apart), tuple(names)) for apart, names in found.items()
        ]


def checksums(tensors: Mapping[str, Tensor], kernels: Kernels, factors: Tensor) -> Tensor:
    """A number for each tensor: (P,) int32, the same in whatever order a device adds.

    Each entry's bits, as float32, are multiplied by an odd number for its row and one for its column, and the products
    are added up modulo 2^32: one bit more or less always changes the sum, and entries that change places do but for
    chance. The bits are folded first, since the product of a highest bit is the same wherever it is.

    Args:
        tensors: float32 or bfloat16, by name.
        kernels: Cut and see them.
        factors: Of `factors`, no shorter than any dimension.
    """
    sums = {name: torch.zeros((), dtype=torch.int32, device=factors.device) for name in tensors}
    for call in kernels.tiles({name: tensor.shape for name, tensor in tensors.items()}):
        for rows in call:
            bits = kernels.bits(rows.of(tensors[rows.name]).float().reshape(rows.number, -1))
            of_rows = (folded(bits) * factors[0, : bits.shape[1]]).sum(dim=1, dtype=torch.int32)
            of_rows = of_rows * factors[1, rows.start : rows.start + rows.number]
            sums[rows.name] = sums[rows.name] + of_rows.sum(dtype=torch.int32)
    return torch.stack(list(sums.values()))


def factors(longest: int) -> Tensor:
    """Odd numbers for columns and for rows of up to so many: (2, longest) int32."""
    return mix_(torch.arange(2 * longest, dtype=torch.int32)).view(2, longest) | 1


def _listed(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
