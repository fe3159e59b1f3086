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


def is_distributed(mesh: Mesh) -> bool:
    """True if the run has other processes."""
    return mesh.world > 1 and dist.is_initialized()


def by_leader(action: Callable[[], T], mesh: Mesh, group: Group, failure: str) -> T:
    """Run an action on rank 0 while the others wait, and broadcast its result.

    Raises:
        CheckpointError: The action failed; raised on every rank. An `NxtrainError` is raised unchanged.
    """
    outcome: list[Any] = [None, None]
    if mesh.rank == 0 or not is_distributed(mesh):
        try:
            outcome[0] = action()
        except NxtrainError as error:
            outcome[1] = error
        except Exception as error:  # of any kind, since the other ranks wait for the outcome
            outcome[1] = CheckpointError(f"{failure}: {error if isinstance(error, OSError) else repr(error)}")
            outcome[1].__cause__ = error
    if is_distributed(mesh):
        dist.broadcast_object_list(outcome, src=0, group=group)
    result, failed = outcome
    if failed is not None:
        raise failed
    return result  # type: ignore[no-any-return]


def together(action: Callable[[], None], mesh: Mesh, group: Group, failure: str) -> None:
    """Run an action on every rank, and wait for all ranks.

    Raises:
        CheckpointError: Any rank failed; every rank raises the same error. An `NxtrainError` is raised unchanged.
    """
    mine: NxtrainError | None = None
    try:
        action()
    except NxtrainError as error:
        mine = error
    except Exception as error:  # of any kind, since the other ranks wait for the outcome
        mine = CheckpointError(f"{failure}: rank {mesh.rank}: {error if isinstance(error, OSError) else repr(error)}")
        mine.__cause__ = error
    for failed in gather(mine, mesh, group):
        if failed is not None:
            raise failed


def gather(mine: T, mesh: Mesh, group: Group) -> list[T]:
    """Values of all ranks, by rank."""
    values = [mine]
    if is_distributed(mesh):
        values *= mesh.world
        dist.all_gather_object(values, mine, group=group)
    return values


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
