"""Joint actions of all ranks, on rank 0 alone or on every rank. A failure on one rank is raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from nxtrain.common.errors import FULL, CheckpointError, NxtrainError, cause_of, more_room
from nxtrain.common.mesh import Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run, for joint actions and decisions. Every rank must make the same calls.

    Args:
        mesh: Mesh of the run.
        group: Process group that carries pickled objects between the hosts; None for the default group.
    """

    mesh: Mesh
    group: dist.ProcessGroup | None = None

    @property
    def are_connected(self) -> bool:
        """True if the run has more than one rank and torch.distributed is initialized."""
        return self.mesh.world > 1 and dist.is_initialized()

    @property
    def is_leader(self) -> bool:
        """True on rank 0."""
        return self.mesh.rank == 0

    def on_leader(self, action: Callable[[], T], failure: str) -> T:
        """Run an action on rank 0 while the other ranks wait. Broadcast the result, or raise the error on all ranks.

        An error that is not an `NxtrainError` becomes a CheckpointError whose message begins with `failure`.
        """
        outcome: list[Any] = [None, None]
        if self.is_leader or not self.are_connected:
            try:
                outcome[0] = action()
            except Exception as error:  # of any kind, since the other ranks wait for the outcome
                outcome[1] = _readable(error, failure)
        if self.are_connected:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, failed = outcome
        if failed is not None:
            raise failed
        return result  # type: ignore[no-any-return]

    def on_all(self, action: Callable[[], T], failure: str) -> list[T]:
        """Run an action on every rank, and return the results by rank; if a rank fails, all ranks raise its error.

        An error that is not an `NxtrainError` becomes a CheckpointError whose message begins with `failure`.
        """
        mine: list[T] = []
        failed: NxtrainError | None = None
        try:
            mine.append(action())
        except Exception as error:  # of any kind, since the other ranks wait for the outcome
            failed = _readable(error, f"{failure}: rank {self.mesh.rank}")
        outcomes = self.gather((mine, failed))
        for _, error_of_rank in outcomes:
            if error_of_rank is not None:
                raise error_of_rank
        results: list[T] = []
        for result, _ in outcomes:
            results += result
        return results

    def gather(self, mine: T) -> list[T]:
        """Gather one value of each rank on all ranks, by rank."""
        values = [mine]
        if self.are_connected:
            values *= self.mesh.world
            dist.all_gather_object(values, mine, group=self.group)
        return values

    def gather_on_leader(self, mine: T) -> list[T]:
        """Gather one value of each rank on rank 0, by rank; other ranks get an empty list."""
        if not self.are_connected:
            return [mine]
        values: list[T] = []
        if self.is_leader:
            values = [mine] * self.mesh.world
        dist.gather_object(mine, values or None, dst=0, group=self.group)
        return values


def _readable(error: Exception, failure: str) -> NxtrainError:
    """Translate an error into an `NxtrainError`; an `NxtrainError` is returned unchanged."""
    if isinstance(error, NxtrainError):
        return error
    cause = repr(error)
    if isinstance(error, OSError):
        cause = cause_of(error)
    if isinstance(error, OSError) and error.errno in FULL:
        cause += f"; {more_room(error.errno)}"
    readable = CheckpointError(f"{failure}: {cause}")
    readable.__cause__ = error
    return readable


@dataclass(frozen=True)
class StorageScope:
    """The folders of one path: one shared file system, or a separate local folder on each node.

    Args:
        ranks: All ranks of the run.
        leader: Rank that writes for all ranks with the same folder as this rank.
        number: Number of separate folders. With 1, all ranks share one folder, and rank 0 is the leader.
    """

    ranks: Ranks
    leader: int = 0
    number: int = 1

    @property
    def leads(self) -> bool:
        """True if this rank is the leader of its folder."""
        return self.leader == self.ranks.mesh.rank

    def on_each(self, action: Callable[[], T], failure: str) -> dict[int, T]:
        """Run an action on the leader of each folder while the other ranks wait; return the results by leader."""
        if self.number == 1:
            return {0: self.ranks.on_leader(action, failure)}
        results = self.ranks.on_all(lambda: [action()] if self.leads else [], failure)
        of_leaders: dict[int, T] = {}
        for rank, result in enumerate(results):
            if result:
                of_leaders[rank] = result[0]
        return of_leaders
