"""Joint actions of ranks on a shared folder: rank 0 or every rank acts, and any failure is raised on all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from nxtrain.errors import CheckpointError, DamagedError, NxtrainError
from nxtrain.mesh import Mesh

T = TypeVar("T")

Group = dist.ProcessGroup | None
"""Process group of all ranks that carries host objects; None: the default group."""


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run, for actions and decisions that they share. Every rank makes the same calls.

    Args:
        mesh: The axes of this rank.
        group: Group of all ranks that carries host objects; None: the default group.
    """

    mesh: Mesh
    group: dist.ProcessGroup | None = None

    @property
    def are_connected(self) -> bool:
        """True if the run has other processes."""
        return self.mesh.world > 1 and dist.is_initialized()

    @property
    def is_leader(self) -> bool:
        """True on rank 0."""
        return self.mesh.rank == 0

    def on_leader(self, action: Callable[[], T], failure: str) -> T:
        """Run an action on rank 0 while the others wait, and broadcast its result.

        Args:
            action: The action.
            failure: Start of the message for an error that is no `NxtrainError`.

        Raises:
            CheckpointError: The action failed; raised on every rank. An `NxtrainError` is raised unchanged.
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

    def on_all(self, action: Callable[[], object], failure: str) -> None:
        """Run an action on every rank, and wait for all ranks.

        Args:
            action: The action.
            failure: Start of the message for an error that is no `NxtrainError`.

        Raises:
            CheckpointError: Any rank failed; every rank raises the same error. An `NxtrainError` is raised unchanged.
        """
        mine: NxtrainError | None = None
        try:
            action()
        except Exception as error:  # of any kind, since the other ranks wait for the outcome
            mine = _readable(error, f"{failure}: rank {self.mesh.rank}")
        for failed in self.gather(mine):
            if failed is not None:
                raise failed

    def gather(self, mine: T) -> list[T]:
        """Values of all ranks, by rank."""
        values = [mine]
        if self.are_connected:
            values *= self.mesh.world
            dist.all_gather_object(values, mine, group=self.group)
        return values


def _readable(error: Exception, failure: str) -> NxtrainError:
    """Turn an error into one for people, unless it is one already."""
    if isinstance(error, NxtrainError):
        return error
    readable = CheckpointError(f"{failure}: {error if isinstance(error, OSError) else repr(error)}")
    readable.__cause__ = error
    return readable


def is_distributed(mesh: Mesh) -> bool:
    """True if the run has other processes."""
    return Ranks(mesh).are_connected


def by_leader(action: Callable[[], T], mesh: Mesh, group: Group, failure: str) -> T:
    """Run an action on rank 0; see `Ranks.on_leader`."""
    return Ranks(mesh, group).on_leader(action, failure)


def together(action: Callable[[], None], mesh: Mesh, group: Group, failure: str) -> None:
    """Run an action on every rank; see `Ranks.on_all`."""
    Ranks(mesh, group).on_all(action, failure)


def gather(mine: T, mesh: Mesh, group: Group) -> list[T]:
    """Values of all ranks, by rank."""
    return Ranks(mesh, group).gather(mine)


@dataclass(frozen=True)
class Disk:
    """The folder under one path, which all nodes share or each node has for itself.

    Args:
        leads: This rank acts for all ranks that see the same folder; one rank per folder does.
        number: Number of different folders.
    """

    leads: bool
    number: int

    def on_each(self, action: Callable[[], object], mesh: Mesh, group: Group, failure: str) -> None:
        """Run an action on the leader of each folder while the others wait.

        Raises:
            CheckpointError: The action failed on some leader; raised on every rank.
        """

        def act() -> None:
            if self.leads:
                action()

        if self.number == 1:
            by_leader(act, mesh, group, failure)
        else:
            together(act, mesh, group, failure)


def shared_disk(mesh: Mesh) -> Disk:
    """`Disk` of a folder that all ranks see, led by rank 0."""
    return Disk(mesh.rank == 0, 1)


@contextmanager
def collective(action: str) -> Iterator[None]:
    """Silence warnings of `torch.distributed.checkpoint`; the failure of any rank becomes one readable error on all."""
    try:
        with warnings.catch_warnings():
            # A single process is no mistake, and the deprecated call is torch's own.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, DamagedError):
            raise cause from None
        if isinstance(cause, NxtrainError):
            raise CheckpointError(f"{action}: {cause}") from None
        if isinstance(cause, Exception):
            raise CheckpointError(f"{action}: rank {rank}: {cause!r}") from error
        raise cause from error
