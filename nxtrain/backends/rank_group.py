"""Ranks of a run as one of them sees them: their numbers, their communication, and a joint end."""

from __future__ import annotations

from abc import ABC
from datetime import timedelta
from typing import TYPE_CHECKING

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Mesh, StateAxes
from nxtrain.common.process.greetings import without_greetings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

    from nxtrain.common.distributed.failures import FailureReporter
    from nxtrain.common.distributed.heartbeats import HeartbeatStore


class RankGroup(ABC):
    """All ranks of a run, and communication between them.

    Attributes:
        name: Name of the backend.
        world, rank: Number of processes, and the rank of this one.
        local_world, local_rank: The same numbers among the processes of this node.
        collectives: Communication with other ranks.
        host_group: Group of all ranks that carries host objects; None: torch's default group.
    """

    name: str
    world: int
    rank: int
    local_world: int
    local_rank: int
    collectives: Collectives
    host_group: ProcessGroup | None = None
    _store: Store | None = None
    _failures: FailureReporter | None = None
    _ends_early = False

    def lay_out(self, mesh: Mesh) -> None:
        """Set the mesh of the run; all ranks call this once, before any communication.

        Ranks of different pipeline stages use their axes in different orders, so their groups must be made here, not
        at the first use.
        """

    def device_mesh(self, axes: StateAxes) -> DeviceMesh:
        """Device mesh of the ranks that hold the same parameters: (shard,) or (replica, shard), for torch's sharding.

        Raises:
            BackendError: The device has no process groups.
        """
        raise BackendError(
            "parallel.shard=grad_op, full and hybrid run on the backends cpu, cuda and neuron-native, not on "
            f"{self.name}; use parallel.shard=zero1, which cuts the optimizer state on every backend"
        )

    def background_group(self, hang_timeout_s: float) -> ProcessGroup | None:
        """Make a group of all ranks for host objects, usable next to training's collectives; None with one rank."""
        import torch.distributed as dist

        if self.world == 1 or not dist.is_initialized():
            return None
        with without_greetings():
            group: ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=hang_timeout_s))
        return group

    def heartbeat_store(self) -> HeartbeatStore | None:
        """Heartbeat store of the ranks, independent of collectives; None if the run has none."""
        if self._store is None:
            return None
        from nxtrain.common.distributed.heartbeats import HeartbeatStore

        return HeartbeatStore(self._store, self.rank, self.world)

    def failed(self, error: Exception) -> Exception:
        """Publish why this rank fails; if it only lost a peer, return the peer's own failure.

        The call takes a few seconds at most. Afterwards `close` does not wait for other ranks, and the process must
        end.

        Args:
            error: Exception that ended the run on this rank.

        Returns:
            The error to report: `error`, or the first failure of another rank.
        """
        if self._failures is None:
            return error
        self._ends_early = True
        return self._failures.failed(error)

    def abandon(self, failure: str) -> None:
        """End all waits of this rank's device for the other ranks, one of which is lost; for any thread.

        Results of collectives that end so are wrong. The next `fetch` raises a LostPeerError.

        Args:
            failure: The loss, in words.
        """
        raise BackendError(f"backend.name={self.name} cannot leave a rank that is lost")

    def compare_graphs(self, work: str) -> None:
        """Compare later graphs between the ranks of a stage before each runs; a comparison takes tens of milliseconds.

        Eager devices have no graphs to compare.

        Args:
            work: Name of the work that the graphs do; the same on all ranks. Empty: end the comparisons.
        """
