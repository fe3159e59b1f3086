"""Base of the backends on `torch.distributed`: gloo on CPU, NCCL on CUDA, TorchNeuron on Trainium."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nxtrain.backends.base import Backend, fetched_names
from nxtrain.backends.diagnostics import Diagnostics
from nxtrain.common.distributed.c10d_collectives import WAIT_CLOCK, C10dCollectives
from nxtrain.common.distributed.failures import FailureReporter
from nxtrain.common.distributed.rendezvous import join_rendezvous
from nxtrain.common.distributed.replacement import end_waits
from nxtrain.common.errors import LostPeerError, NxtrainError
from nxtrain.common.mesh import Mesh, StateAxes
from nxtrain.common.process.deadlines import describe_limit, first_use_limit_s
from nxtrain.common.process.greetings import suppress_gloo_messages
from nxtrain.common.process.placement import Placement


class C10dDiagnostics(Diagnostics):
    """Measurements of ranks that are processes of `torch.distributed`."""

    def waited_s(self) -> float:
        return WAIT_CLOCK.total_s


class C10dBackend(Backend):
    """Backend whose ranks are processes of `torch.distributed`.

    `_group_patience_s` is added to the time limit of process groups whose clock starts before the watchdog's, in
    seconds. `_lost` is the message about a lost rank whose waits have been ended.
    """

    collectives: C10dCollectives
    diagnostics: Diagnostics = C10dDiagnostics()
    _group_patience_s = 0.0
    _lost = ""

    def _read_placement(self) -> None:
        placement = Placement.read()
        self.rank, self.world = placement.rank, placement.world
        self.local_rank, self.local_world = placement.local_rank, placement.local_world
        self.collectives = C10dCollectives(self.world)

    def _join(
        self, process_group: str, hang_timeout_s: float, device_id: torch.device | None = None, *, rejoined: int = 0
    ) -> None:
        limit_s = hang_timeout_s
        if self.compiles_at_first_use:
            # Ranks wait in a collective for one that compiles; once nothing is new, the watchdog's limit is shorter.
            limit_s = first_use_limit_s(hang_timeout_s)
        limit_s += self._group_patience_s
        self.collectives.hang_timeout_s = limit_s
        self.collectives.limit = describe_limit(hang_timeout_s, first_use=self.compiles_at_first_use)
        if self.world > 1:
            timeout = timedelta(seconds=limit_s)
            # An explicit store, since heartbeats and failures use the store too.
            self._store = store = join_rendezvous(self.rank, self.world, timedelta(seconds=hang_timeout_s), rejoined)
            self._failures = FailureReporter(store, self.rank, hang_timeout_s, self.collectives.rank_name)
            with suppress_gloo_messages():
                dist.init_process_group(
                    process_group,
                    store=store,
                    rank=self.rank,
                    world_size=self.world,
                    timeout=timeout,
                    device_id=device_id,
                )

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        flat = [value.detach().to(self.device, torch.float32).reshape(-1) for value in values.values()]
        numbers = torch.cat(flat).tolist()
        if self._lost:
            raise LostPeerError(self._lost)
        return dict(zip(fetched_names(values), numbers, strict=True))

    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        return self.put(torch.tensor(values, dtype=torch.float32)).unbind()

    def lay_out(self, mesh: Mesh) -> None:
        self.collectives.lay_out(mesh)

    def device_mesh(self, axes: StateAxes) -> DeviceMesh:
        return self.collectives.device_mesh(self.device.type, axes)

    def close(self) -> None:
        super().close()
        # Not after a failure: destroying the group would hold the GIL and wait for ranks that wait for this rank's end.
        if self.world > 1 and not self._ends_early:
            self.collectives.forget()
            dist.destroy_process_group()


class AcceleratorBackend(C10dBackend):
    """Backend whose device has its own memory and computes asynchronously to the host."""

    is_asynchronous = True

    def abandon(self, failure: str) -> None:
        # Set before the waits end, since the main thread continues as soon as its device does.
        self._lost = failure
        end_waits()

    def failed(self, error: Exception) -> Exception:
        # After `abandon`, errors such as those of ended process groups mean the lost rank.
        if self._lost and not isinstance(error, NxtrainError):
            error = LostPeerError(self._lost)
        return super().failed(error)
