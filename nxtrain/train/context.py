"""Context of a run on one rank: its open device, and everything that is fixed with the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from nxtrain.backends import choose, choose_layers, open_backend
from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Backend, BackendSettings
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import StoppedBySignal
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.clock import Instant, now
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.deadlines import CLOSING_S, close_with_deadline, open_with_deadline
from nxtrain.common.process.placement import Placement
from nxtrain.common.process.signals import Signals
from nxtrain.common.run_folder import LOGS_DIR
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import Loaded
from nxtrain.config.schema import RunConfig
from nxtrain.metrics.run_observer import Work
from nxtrain.train.build import mesh_of
from nxtrain.train.supervision.run_lock import only_run
from nxtrain.train.supervision.watchdog import Watchdog


@dataclass(frozen=True)
class RunContext:
    """Context of a run on one rank; `open` makes it.

    Args:
        plan: The checked configuration.
        backend: This rank's device.
        mesh: The axes of this rank.
        ranks: All ranks, for joint actions.
        placement: Placement of this process in its job.
        began: Time when this start of the run began.
        print_line: Prints a line for the user, on the leader only.
        reason: Reason for the choice of the backend and its layers.
        watchdog: Watchdog of this rank; None: there is none.
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
        """Lay the ranks out as configured, and prepare the backend for the model.

        Args:
            backend: This rank's device, open.
            plan: The checked configuration.
            reason: Reason for the choice of the backend and its layers.
            placement: Placement of this process in its job; None: as the environment has it.
            began: Time when this start of the run began; None: now.
            watchdog: Watchdog of this rank; None: there is none.

        Raises:
            ConfigError: The degrees do not fit the world.
            BackendError: The configured attention cannot run on the device.
        """
        mesh, config = mesh_of(plan, backend), plan.config
        placement = placement or Placement.read()
        backend.choose_attention(config.backend.attention, AttentionShape.of(config, plan.dimensions))
        backend.choose_rounding(config.precision.update, config.backend.rounding)
        if watchdog is not None:
            stages = [mesh.pp.group_of(rank).index(rank) for rank in range(mesh.world)]
            watchdog.lay_out(lambda rank: mesh.words(rank) + placement.on_nodes([rank]), stages)
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
        """Values of the configuration."""
        return self.plan.config

    @property
    def is_leader(self) -> bool:
        """True on rank 0, which writes the run's files."""
        return self.ranks.is_leader

    def enter(self, step: int, work: Work) -> None:
        """Enter a piece of work that only the watchdog observes."""
        if self.watchdog is not None:
            self.watchdog.enter(step, work)

    def drain(self) -> None:
        """Tell the watchdog that this rank waits for the last checkpoint; called again and again during the wait."""
        if self.watchdog is not None:
            self.watchdog.drain()

    @property
    def is_stop_requested(self) -> bool:
        """True if this process received a stop signal, even if the run goes on to its end."""
        return self.watchdog is not None and self.watchdog.is_asked


@contextmanager
def open_run(loaded: Loaded, signals: Signals, began: Instant | None = None) -> Iterator[RunContext]:
    """Open this rank's device, watchdog and folder for a run; they are closed at the end of this context.

    Args:
        loaded: The configuration.
        signals: Stop signals that this process has received.
        began: Start time of this attempt; None: now.

    Raises:
        NxtrainError: An error that the user can correct; the message names the way out.
    """
    config, placement = loaded.config, Placement.read()
    limit_s, folder = config.recovery.hang_timeout_s, config.run.dir
    name, layers, reason = _choose_device(config)
    settings = BackendSettings(
        hang_timeout_s=limit_s,
        torch_compile=config.compile.torch_compile,
        cpu_transport=config.backend.cpu_transport,
        allow_unverified=config.backend.allow_unverified,
    )
    backend = open_with_deadline(lambda: open_backend(name, settings, layers), limit_s)
    ended: BaseException | None = None
    try:
        plan = resolve_config(loaded, backend.world, backend.name)
        lock: AbstractContextManager[None] = nullcontext()
        if backend.rank == 0 and not backend.extracts:  # a run that only extracts graphs writes nothing
            lock = only_run(folder, standard_error().print, restarted=placement.is_restart, most_s=0.5 * limit_s)
        with Watchdog(backend, limit_s, folder / LOGS_DIR, signals) as watchdog, lock:
            yield RunContext.open(backend, plan, reason=reason, placement=placement, began=began, watchdog=watchdog)
    except BaseException as error:
        ended = error
        if isinstance(error, Exception) and not isinstance(error, StoppedBySignal):
            ended = backend.failed(error)
        if ended is error:
            raise
        raise ended from error
    finally:
        close_with_deadline(backend.close, min(limit_s, CLOSING_S), ended)


def _choose_device(config: RunConfig) -> tuple[str, str, str]:
    """Names of the backend and of its layers, and the reason for the choice."""
    chosen = config.backend
    name, reason = choose(chosen.name, in_full=config.recovery.debug != "off")
    layers, of_layers = choose_layers(
        chosen.layers, name, allow_unverified=chosen.allow_unverified, adapted=config.finetune.adapts
    )
    if of_layers:
        reason += f"; layers {layers}: {of_layers}"
    return name, layers, reason
