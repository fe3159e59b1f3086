"""Implementation of `nxtrain train`: a whole run on one rank, from a loaded configuration to the last checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import count

from nxtrain.backends import choose, choose_layers, open_backend
from nxtrain.backends.base import BackendSettings
from nxtrain.common.distributed.failures import loss
from nxtrain.common.distributed.replacement import end_waits, refuse, rejoin, without_stacks
from nxtrain.common.errors import LostPeerError, RestartError, StoppedBySignal
from nxtrain.common.process.clock import Instant, now
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.deadlines import CLOSING_S, close_with_deadline, open_with_deadline
from nxtrain.common.process.placement import Placement
from nxtrain.common.process.signals import Signals
from nxtrain.common.process.stacks import print_line
from nxtrain.common.run_folder import LOGS_DIR
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import Loaded
from nxtrain.config.model_folder import with_commit
from nxtrain.config.schema import RunConfig
from nxtrain.metrics.run_observer import RunObserver
from nxtrain.train.assembly import assemble
from nxtrain.train.build import context_parallel_of
from nxtrain.train.context import RunContext
from nxtrain.train.graph_extraction import extract_graphs
from nxtrain.train.rank_memory import RankMemory
from nxtrain.train.supervision.run_lock import only_run
from nxtrain.train.supervision.watchdog import Watchdog
from nxtrain.train.tokenizer import fetch_weights


def train(loaded: Loaded, plan: Resolved, signals: Signals | None = None, began: Instant | None = None) -> None:
    """Run training as configured, on a single rank or on every rank under torchrun.

    Args:
        loaded: Loaded configuration.
        plan: Validated configuration.
        signals: Stop signals that this process has received; None for none.
        began: Start time of this attempt; None for the current time.

    Raises:
        NxtrainError: An error that the user can correct; the message names the way out.
        StoppedBySignal: The run stopped because of a signal.
    """
    signals = signals or Signals()
    memory = RankMemory(is_kept=loaded.config.recovery.in_job)
    for rejoined in count():
        lost = _train_until_loss(loaded, plan, signals, began, memory, rejoined)
        if lost is None:
            return
        began = now()
        print_line(f"rank {Placement.read().rank}: {lost}; this rank keeps its state, and waits for a replacement")
        end_waits()
        memory.detach()
        if not rejoin(rejoined):
            raise lost


def _train_until_loss(
    loaded: Loaded, plan: Resolved, signals: Signals, began: Instant | None, memory: RankMemory, rejoined: int
) -> Exception | None:
    """Train until the run is done, or until a peer rank is lost; return the loss as an exception, or None if done.

    Arguments are those of `open_run`. If the rank's memory is not kept, a lost peer ends the run. No variable of this
    function may outlive the loss, since the parts of the run hold process groups and activations.
    """
    try:
        with open_run(loaded, plan, signals, began, rejoined) as context:
            train_on(context, memory)
    except RestartError:
        if memory.is_kept:
            refuse(rejoined)
        raise
    except Exception as error:
        if not (memory.is_kept and isinstance(loss(error), LostPeerError)):
            raise
        return without_stacks(error)
    return None


def train_on(context: RunContext, memory: RankMemory | None = None) -> None:
    """Train on an open backend, or extract the run's graphs; `memory` keeps the state from one start to the next."""
    backend, mesh = context.backend, context.mesh
    context.print_line(f"backend {backend.name} ({context.reason}); {mesh.world} ranks: {_degrees(context)}")
    for note in dict.fromkeys((*backend.binding.notes(), *backend.notes())):
        context.print_line(note)
    if context.config.precision.params == "bf16":
        warning = backend.diagnostics.bf16_warning()
        if warning:
            context.print_line(warning)
    if backend.extracts:
        # Printed on every node, since the compiler's tool on each node reads the lines of that node's ranks.
        console = standard_error(quiet=backend.local_rank != 0)
        extract_graphs(context.plan, backend, mesh, console.print)
        return
    run = assemble(context, memory or RankMemory())
    val_loss = run.train()
    run.finish(val_loss)


@contextmanager
def open_run(
    loaded: Loaded, plan: Resolved, signals: Signals, began: Instant | None = None, rejoined: int = 0
) -> Iterator[RunContext]:
    """Open this rank's device, watchdog and run folder in a context, and close them at its end.

    Args:
        loaded: Loaded configuration.
        plan: Validated configuration.
        signals: Stop signals that this process has received.
        began: Start time of this attempt; None for the current time.
        rejoined: Number of times that this process has rejoined the other ranks after a rank was lost.

    Raises:
        NxtrainError: An error that the user can correct; the message names the way out.
    """
    loaded = replace(loaded, config=with_commit(loaded.config))
    config, placement = loaded.config, Placement.read()
    placement = replace(placement, restarts=placement.restarts + rejoined)
    fetch_weights(config)
    limit_s, folder = config.recovery.hang_timeout_s, config.run.dir
    name, layers, reason = _choose_device(config)
    settings = BackendSettings(
        hang_timeout_s=limit_s,
        torch_compile=bool(config.compile.torch_compile),
        cpu_transport=config.backend.cpu_transport,
        allow_unverified=config.backend.allow_unverified,
        deterministic=config.backend.deterministic,
        rejoined=rejoined,
    )
    backend = open_with_deadline(lambda: open_backend(name, settings, layers), limit_s)
    ended: BaseException | None = None
    try:
        if config.backend.name == "auto":  # some rules between keys need the name of the chosen backend
            plan = resolve_config(loaded, backend.world, backend.name)
        lock: AbstractContextManager[RunObserver] = nullcontext(RunObserver())
        if backend.rank == 0 and not backend.extracts:  # a run that only extracts graphs writes nothing
            lock = only_run(folder, standard_error().print, restarted=placement.is_restart, most_s=0.5 * limit_s)
        keeps_state = config.recovery.in_job
        logs = folder / LOGS_DIR
        watched = Watchdog(backend, limit_s, logs, signals, has_agent=placement.has_agent, keeps_state=keeps_state)
        with watched as watchdog, lock as held:
            context = RunContext.open(backend, plan, reason=reason, placement=placement, began=began, watchdog=watchdog)
            yield replace(context, lock=held)
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
    """Names of the backend and of its layer set, and the reason for the choice."""
    chosen = config.backend
    name, reason = choose(chosen.name, in_full=config.recovery.debug != "off")
    layers, of_layers = choose_layers(
        chosen.layers, name, allow_unverified=chosen.allow_unverified, needs_own=config.needs_own_layers
    )
    if of_layers:
        reason += f"; layers {layers}: {of_layers}"
    return name, layers, reason


def _degrees(context: RunContext) -> str:
    """Parallel degrees and the sharding of the training state, as text for the user."""
    parallel, mesh = context.config.parallel, context.mesh
    degrees = ""
    if mesh.pp_size > 1:
        degrees = f"pp {mesh.pp_size}"
        if parallel.virtual_pp > 1:
            degrees += f" of {parallel.virtual_pp} chunks each"
        elif parallel.schedule == "zero_bubble":
            degrees += " (zero_bubble)"
        degrees += ", "
    degrees += f"tp {mesh.tp_size}, "
    ranks = context_parallel_of(context.plan, context.backend, mesh)
    if ranks is not None:
        degrees += f"cp {ranks.axis.size} ({ranks.method}, {ranks.cut.layout}), "
    degrees += f"dp {mesh.dp_size}"
    if mesh.ep_size > 1:
        degrees += f", experts divided by {mesh.ep_size}"
    if parallel.shard == "none":
        return degrees
    if mesh.shard_size == 1:
        return f"{degrees}; one rank holds all state, so that parallel.shard={parallel.shard} changes nothing"
    return f"{degrees}, state cut over {mesh.shard_size} of them ({parallel.shard})"
