"""What ranks do together on a shared folder: one acts for all, or all act, and each learns of any failure."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from nxtrain.errors import CheckpointError, DamagedError
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
        CheckpointError: It failed; on every rank.
    """
    told: list[Any] = [None, None]
    if mesh.rank == 0 or not is_distributed(mesh):
        try:
            told[0] = action()
        except CheckpointError as error:
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
        CheckpointError: Any failed; on every rank, the same.
    """
    mine: CheckpointError | None = None
    try:
        action()
    except CheckpointError as error:
        mine = error
    except Exception as error:  # whatever it is, the others wait
        mine = CheckpointError(f"{failure}: rank {mesh.rank}: {error if isinstance(error, OSError) else repr(error)}")
        mine.__cause__ = error
    told = [mine]
    if is_distributed(mesh):
        told *= mesh.world
        dist.all_gather_object(told, mine, group=group)
    for failed in told:
        if failed is not None:
            raise failed


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
        if isinstance(cause, CheckpointError):
            raise CheckpointError(f"{action}: {cause}") from None
        if isinstance(cause, Exception):
            raise CheckpointError(f"{action}: rank {rank}: {cause!r}") from error
        raise cause from error
