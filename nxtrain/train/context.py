"""Context of a run on one rank: the open device and all objects that depend on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Backend
from nxtrain.backends.expert_choice import ExpertShape
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.clock import Instant, now
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.placement import Placement
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.metrics.run_observer import RunObserver, Work
from nxtrain.train.build import context_parallel_of, mesh_of
from nxtrain.train.ring_trial import refuse_wrong_ring
from nxtrain.train.supervision.watchdog import Watchdog


@dataclass(frozen=True)
class RunContext:
    """Context of a run on one rank; `RunContext.open` creates it.

    Args:
        plan: Validated configuration.
        backend: This rank's device.
        mesh: The axes of this rank.
        ranks: All ranks, for joint actions.
        placement: Placement of this process in its job.
        began: Time when this start of the run began.
        print_line: Prints a line for the user, on the leader only.
        reason: Reason for the choice of the backend and its layers.
        watchdog: Watchdog of this rank; None for none.
        lock: Observer that keeps the lock of the run's folder.
    """

    plan: Resolved
    backend: Backend
    mesh: Mesh
    ranks: Ranks
    placement: Placement
    began: Instant
    print_line: Callable[[str], None]
    reason: str
    watchdog: Watchdog | None = None
    lock: RunObserver = field(default_factory=RunObserver)

    @staticmethod
    def open(
        backend: Backend,
        plan: Resolved,
        *,
        reason: str = "opened by the caller",
        placement: Placement | None = None,
        began: Instant | None = None,
        watchdog: Watchdog | None = None,
    ) -> RunContext:
        """Build the mesh of the ranks as configured, and choose the backend's kernels for the model.

        Args:
            backend: This rank's device, open.
            plan: Validated configuration.
            reason: Reason for the choice of the backend and its layers.
            placement: Placement of this process in its job; None to read it from the environment.
            began: Time when this start of the run began; None for the current time.
            watchdog: Watchdog of this rank; None for none.

        Raises:
            ConfigError: The degrees do not fit the number of ranks, or the device lacks the configured products.
            BackendError: The configured attention cannot run on the device.
        """
        mesh, config = mesh_of(plan, backend), plan.config
        placement = placement or Placement.read()
        attention, head_size = config.backend.attention, plan.dimensions.head_size
        backend.choose_attention(attention, AttentionShape.of(config, plan.dimensions))
        refuse_wrong_ring(backend, context_parallel_of(plan, backend, mesh), mesh.all, head_size, attention)
        backend.choose_experts(config.backend.experts, ExpertShape.of(config, plan.dimensions))
        backend.choose_rounding(config.precision.update, config.backend.rounding)
        backend.choose_float8(config.precision.fp8, config.precision.params)
        if watchdog is not None:
            stages = [mesh.pp.group_of(rank).index(rank) for rank in range(mesh.world)]
            watchdog.lay_out(lambda rank: mesh.rank_name(rank) + placement.on_nodes([rank]), stages)
        return RunContext(
            plan=plan,
            backend=backend,
            mesh=mesh,
            ranks=Ranks(mesh, backend.host_group),
            placement=placement,
            began=began or now(),
            print_line=standard_error(quiet=mesh.rank != 0).print,
            reason=reason,
            watchdog=watchdog,
        )

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        return self.plan.config

    @property
    def is_leader(self) -> bool:
        """True on rank 0, which writes the files of the run."""
        return self.ranks.is_leader

    @property
    def observers(self) -> tuple[RunObserver, RunObserver]:
        """Observers of this rank that exist before the run is assembled: the lock and the watchdog."""
        return self.lock, self.watchdog or RunObserver()

    def enter(self, step: int, work: Work) -> None:
        """Report the start of a kind of work to the watchdog only, not to the other observers."""
        if self.watchdog is not None:
            self.watchdog.enter(step, work)

    def drain(self) -> None:
        """Report to the watchdog that this rank waits for the last checkpoint; called repeatedly during the wait."""
        if self.watchdog is not None:
            self.watchdog.drain()

    @property
    def is_stop_requested(self) -> bool:
        """True if this process received a stop signal, even if the run continues to its end."""
        return self.watchdog is not None and self.watchdog.is_asked
