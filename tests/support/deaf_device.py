"""A CPU whose ranks wait for a lost one as a GPU does: without an error, until their groups are aborted.

The sums of an aborted group are wrong. Ranks of a run call `install` first: see `forked_python.FIRST`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nxtrain.backends import cpu
from nxtrain.backends.base import DEFAULTS, BackendSettings
from nxtrain.backends.c10d import AcceleratorBackend
from nxtrain.common.distributed import c10d_collectives
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Pending
from nxtrain.common.errors import LostPeerError
from nxtrain.common.process.stacks import print_line

MUTANT = "DEAF_DEVICE_MUTANT"
"""Variable: if it is set, the memory of a rank does not wait for the sums before an update."""

HEARD = "the device waits no longer"
"""Line of a rank whose wait an abort has ended."""

_abandoned = threading.Event()
_wait = c10d_collectives._Async.wait


class DeafDevice(AcceleratorBackend, cpu.CpuBackend):
    """CPU tensors, of which the host takes no notice until it fetches some."""

    def __init__(self, settings: BackendSettings = DEFAULTS) -> None:
        _abandoned.clear()
        super().__init__(settings)

    def abandon(self, failure: str) -> None:
        super().abandon(failure)
        _abandoned.set()

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        if MUTANT in os.environ and "num_updates" in values:
            return {}
        return super().fetch(values)


@dataclass(frozen=True)
class _Queued:
    """A sum that was queued before the host knew of the loss."""

    x: Tensor

    def wait(self) -> Tensor:
        if not _abandoned.is_set():
            assert _abandoned.wait(20), "nobody has told of the loss"
            print_line(HEARD)
        return self.x.add_(1)


def _wait_like_a_device(self: Any) -> Tensor:
    try:
        return _wait(self)
    except (LostPeerError, ValueError):  # the latter of groups that are aborted
        return _Queued(self.result).wait()


def _queueing(start: Callable[..., Pending[Tensor]]) -> Callable[..., Pending[Tensor]]:
    def start_like_a_device(self: Any, x: Tensor, *rest: Any) -> Pending[Tensor]:
        try:
            return start(self, x, *rest)
        except (RuntimeError, ValueError):  # of a peer or a group that is gone
            return _Queued(x)

    return start_like_a_device


def install() -> None:
    """Take the place of the CPU in this process."""
    cpu.CpuBackend = DeafDevice  # type: ignore[misc]
    c10d_collectives._Async.wait = _wait_like_a_device  # type: ignore[method-assign]
    for name in ("start_all_reduce", "_start_sum"):
        setattr(C10dCollectives, name, _queueing(getattr(C10dCollectives, name)))
