"""What ranks do together on a shared folder: one acts for all, or all act, and each learns of any failure."""

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
"""All ranks, able to carry host objects; None: the default group."""


def is_distributed(mesh: Mesh) -> bool:
    """Whether other processes take part."""
    return mesh.world > 1 and dist.is_initialized()


def by_leader(action: Callable[[], T], mesh: Mesh, group: Group, failure: str) -> T:
    """Let rank 0 act while the others wait, and give its result to all.

    Raises:
        CheckpointError: It failed; on every rank. Another error for people is raised as it is.
    """
    told: list[Any] = [None, None]
    if mesh.rank == 0 or not is_distributed(mesh):
        try:
            told[0] = action()
        except NxtrainError as error:
            told[1] = error
        except Exception as error:  # whatever it is, the others wait
            told[1] = CheckpointError(f"{failure}: {error if isinstance(error, OSError) else repr(error)}")
            told[1].__cause__ = error
    if is_distributed(mesh):
        dist.broadcast_object_list(told, src=0, group=group)
    result, failed = told
    if failed is not None:
        raise failed
    return result  # type: ignore[no-any-return]


def together(action: Callable[[], None], mesh: Mesh, group: Group, failure: str) -> None:
    """Let every rank act, and wait for all of them.

    Raises:
        CheckpointError: Any failed; on every rank, the same. Another error for people is raised as it is.
    """
    mine: NxtrainError | None = None
    try:
        action()
    except NxtrainError as error:
        mine = error
    except Exception as error:  # whatever it is, the others wait
        mine = CheckpointError(f"{failure}: rank {mesh.rank}: {error if isinstance(error, OSError) else repr(error)}")
        mine.__cause__ = error
    for failed in gather(mine, mesh, group):
        if failed is not None:
            raise failed


def gather(mine: T, mesh: Mesh, group: Group) -> list[T]:
    """What every rank has, by rank."""
    told = [mine]
    if is_distributed(mesh):
        told *= mesh.world
        dist.all_gather_object(told, mine, group=group)
    return told


@dataclass(frozen=True)
class Disk:
    """What a rank does for a folder of which nodes may have one each, under one path.

    Args:
        leads: It acts there, for all ranks that see the same folder; one of them does.
        number: So many different folders there are.
    """

    leads: bool
    number: int

    def on_each(self, action: Callable[[], object], mesh: Mesh, group: Group, failure: str) -> None:
        """Let the leader of each folder act while the others wait.

        Raises:
            CheckpointError: It failed somewhere; on every rank.
        """

        def act() -> None:
            if self.leads:
                action()

        if self.number == 1:
            by_leader(act, mesh, group, failure)
        else:
            together(act, mesh, group, failure)


def shared_disk(mesh: Mesh) -> Disk:
    """A folder that all ranks see."""
    return Disk(mesh.rank == 0, 1)


@contextmanager
def collective(action: str) -> Iterator[None]:
    """Run `torch.distributed.checkpoint` quietly; the failure of any rank becomes one readable error on all."""
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
