"""Interface to the ranks of a run: rank numbers, collectives, host groups, and failures of ranks."""

from __future__ import annotations

from abc import ABC
from datetime import timedelta
from typing import TYPE_CHECKING

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Mesh, StateAxes
from nxtrain.common.process.greetings import suppress_gloo_messages

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

    from nxtrain.common.distributed.failures import FailureReporter
    from nxtrain.common.distributed.heartbeats import HeartbeatStore


class RankGroup(ABC):
    """Ranks of a run as one rank uses them: rank numbers, collectives and failure reports.

    Attributes:
        name: Name of the backend.
        world, rank: Number of processes, and the rank of this process.
        local_world, local_rank: Number of processes of this node, and the rank of this process among them.
        collectives: Collectives and transfers between ranks.
        host_group: Process group of all ranks for host objects; None for torch's default group.
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

        Process groups are created here, not on first use, since ranks of different pipeline stages use their axes in
        different orders.
        """

    def device_mesh(self, axes: StateAxes) -> DeviceMesh:
        """Device mesh of the ranks with the same parameters: (shard,) or (replica, shard), for torch's FSDP sharding.

        Raises:
            BackendError: The device has no process groups.
        """
        raise BackendError(
            "parallel.shard=grad_op, full and hybrid run on the backends cpu, cuda and neuron-native, not on "
            f"{self.name}; use parallel.shard=zero1, which shards the optimizer state on every backend"
        )

    def background_group(self, hang_timeout_s: float) -> ProcessGroup | None:
        """Create a gloo group of all ranks for host objects, for use during training; None with one rank."""
        import torch.distributed as dist

        if self.world == 1 or not dist.is_initialized():
            return None
        with suppress_gloo_messages():
            group: ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=hang_timeout_s))
        return group

    def heartbeat_store(self) -> HeartbeatStore | None:
        """Heartbeat store of the ranks, independent of collectives; None if the run has none."""
        if self._store is None:
            return None
        from nxtrain.common.distributed.heartbeats import HeartbeatStore

        return HeartbeatStore(self._store, self.rank, self.world)

    def failed(self, error: Exception) -> Exception:
        """Publish the failure of this rank, and return the error to report: its own, or that of a lost peer.

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
        """End all waits of this rank's device for other ranks after one rank is lost; callable from any thread.

        Interrupted collectives give wrong results. The next `fetch` raises a LostPeerError.

        Args:
            failure: Description of the lost rank.
        """
        raise BackendError(f"backend.name={self.name} cannot end its waits for a lost rank; use recovery.in_job=false")

    def compare_graphs(self, work: str) -> None:
        """Compare each later graph between the ranks of a pipeline stage before the graph runs.

        A comparison takes tens of milliseconds. Eager devices have no graphs to compare.

        Args:
            work: Name of the part of the step that the graphs compute, equal on all ranks; empty to end comparisons.
        """
