"""A whole run on one rank: from a loaded configuration to the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Literal, cast

from nxtrain.backends import choose, choose_layers, open_backend
from nxtrain.backends.base import Backend, BackendSettings
from nxtrain.backends.diagnostics import DeviceEvent
from nxtrain.checkpoint.directory import Retention, clear, prune
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror import Mirrored, open_mirrored
from nxtrain.common.errors import CheckpointError, DivergedError, NxtrainError, RestartError, StoppedBySignal
from nxtrain.common.process.clock import Instant
from nxtrain.common.process.console import PipeSafeConsole, standard_error
from nxtrain.common.process.deadlines import CLOSING_S, close_with_deadline, open_with_deadline
from nxtrain.common.process.placement import Placement
from nxtrain.common.process.signals import Signals
from nxtrain.common.run_folder import ADAPTER_DIR, CHECKPOINTS_DIR, CONFIG_FILE, LOGS_DIR
from nxtrain.config.check import resolve_config
from nxtrain.config.duration import with_epochs_as_steps
from nxtrain.config.load import Loaded
from nxtrain.config.show import dump
from nxtrain.data import Data, StreamLoader, Streams
from nxtrain.metrics.goodput_meter import GoodputMeter
from nxtrain.metrics.meters import ThroughputMeter
from nxtrain.metrics.run_observer import Observers, Outcome, RunObserver
from nxtrain.metrics.sinks import open_sinks
from nxtrain.metrics.start_log import StepFile
from nxtrain.metrics.work_meter import WorkMeter
from nxtrain.metrics.work_timeline import EventTimeline, HostTimeline, WorkTimeline
from nxtrain.optim.schedule import Schedule
from nxtrain.train.adapters import base_fingerprint, save_adapter
from nxtrain.train.checkpoints import Checkpoints, RunIdentity
from nxtrain.train.compatibility import RunInputs, meta_at
from nxtrain.train.context import RunContext
from nxtrain.train.environment import record_environment
from nxtrain.train.graph_extraction import extract_graphs
from nxtrain.train.health.fallbacks import Fallbacks
from nxtrain.train.health.initial_norm import measure_initial_norm
from nxtrain.train.health.numerics import NumericsGuard
from nxtrain.train.health.out_of_memory import explaining_memory
from nxtrain.train.health.recompiles import Recompiles
from nxtrain.train.health.rollbacks import Rollbacks
from nxtrain.train.run_data import open_run_data, train_loader, validation_loader
from nxtrain.train.start import start
from nxtrain.train.step import TrainState
from nxtrain.train.summary import Summary, summarize
from nxtrain.train.supervision.coordinated_stop import StepGate
from nxtrain.train.supervision.crash_loop import fingerprint, refuse_crash_loop
from nxtrain.train.supervision.preflight import check_folder, check_space
from nxtrain.train.supervision.run_lock import only_run
from nxtrain.train.supervision.watchdog import Watchdog
from nxtrain.train.trainer import Trainer


def train(loaded: Loaded, signals: Signals | None = None, began: Instant | None = None) -> None:
    """Train as configured: one rank, or every rank under torchrun.

    Args:
        loaded: The configuration.
        signals: Stop signals that this process has received; None: none.
        began: Start time of this attempt; None: now.

    Raises:
        NxtrainError: An error that the user can correct; the message names the way out.
        StoppedBySignal: The run stopped because a signal asked for it.
    """
    place, chosen = Placement.read(), loaded.config.backend
    name, reason = choose(chosen.name, in_full=loaded.config.recovery.debug != "off")
    adapted = loaded.config.finetune.adapts
    layers, why = choose_layers(chosen.layers, name, allow_unverified=chosen.allow_unverified, adapted=adapted)
    reason += f"; layers {layers}: {why}" if why else ""
    limit_s, folder = loaded.config.recovery.hang_timeout_s, loaded.config.run.dir
    settings = BackendSettings(
        hang_timeout_s=limit_s,
        torch_compile=loaded.config.compile.torch_compile,
        cpu_transport=chosen.cpu_transport,
        allow_unverified=chosen.allow_unverified,
    )
    backend = open_with_deadline(lambda: open_backend(name, settings, layers), limit_s)
    ended: BaseException | None = None
    try:
        plan = resolve_config(loaded, backend.world, backend.name)
        # Only the leader locks the folder, and not for a run that only extracts graphs.
        lock = only_run(folder, standard_error().print, restarted=place.is_restart, most_s=0.5 * limit_s)
        watched = Watchdog(backend, limit_s, folder / LOGS_DIR, signals or Signals())
        with watched as watchdog, nullcontext() if backend.rank or backend.extracts else lock:
            context = RunContext.open(backend, plan, place=place, began=began, watchdog=watchdog)
            train_on(context, reason)
    except BaseException as error:
        ended = error
        if isinstance(error, Exception) and not isinstance(error, StoppedBySignal):
            ended = backend.failed(error)
        if ended is error:
            raise
        raise ended from error
    finally:
        close_with_deadline(backend.close, min(limit_s, CLOSING_S), ended)


def train_on(context: RunContext, reason: str) -> None:
    """Train on an open backend.

    Args:
        context: The run on this rank.
        reason: Reason for the choice of the backend and its layers.
    """
    _announce(context, reason)
    if context.backend.extracts:
        # Printed on every node, since the compiler's tool on each node reads the lines of that node's ranks.
        console = PipeSafeConsole(stderr=True, soft_wrap=True, quiet=context.backend.local_rank != 0)
        extract_graphs(context.plan, context.backend, context.mesh, console.print)
        return
    mirrored = _claim_folder(context)
    data = open_run_data(context, mirrored)
    context = _with_steps(context, data)
    if context.is_leader:
        config = context.config
        refuse_crash_loop(config.run.dir / LOGS_DIR, fingerprint(dump(config)), config.recovery.max_same_step)
    base = context.ranks.on_leader(lambda: base_fingerprint(context.config), "cannot read the frozen weights")
    inputs = RunInputs.of(data.fingerprint, data.tokenizer, data.end_of_text, trained=data.trained, base=base)
    context.enter(0, "restore")
    rollbacks = Rollbacks(context.config.run.dir, context.ranks)
    initial = list[RunObserver]()

    def measure(drawn: TrainState) -> None:
        found, line = measure_initial_norm(drawn)
        context.print_line(line)
        initial.append(found)

    state, meta = start(context, inputs, mirrored, rollbacks, measure)
    rollbacks.resume(meta.step)
    context.enter(meta.step, "start")
    _announce_start(context, data, meta)
    _prepare_folder(context, state)
    val_loss = _train(context, data, inputs, state, meta, mirrored, rollbacks, initial)
    if context.config.finetune.adapts:
        save_adapter(context.config.run.dir / ADAPTER_DIR, state, meta_at(0, context.plan, inputs))
    if context.is_leader and val_loss is not None:
        evaluated = context.config.train.eval_batches * context.config.train.global_batch
        summary = Summary.of(val_loss, data, evaluated, doc_mask=context.config.data.doc_mask)
        summarize(context.config.run.dir, summary, context.print_line)


def _claim_folder(context: RunContext) -> Mirrored | None:
    """Open the mirror of the run's folder, if any, and refuse a folder in which the run cannot or should not start."""
    config, mirrored = context.config, None
    if config.checkpoint.mirror:
        folder = config.run.dir / CHECKPOINTS_DIR
        mirrored = open_mirrored(config.checkpoint.mirror, folder, context.ranks, context.backend.local_rank)
    if context.is_leader:
        check_folder(config.run.dir)
    return mirrored


def _with_steps(context: RunContext, data: Data) -> RunContext:
    """The run with `train.epochs` as steps, once the rows are known."""
    epochs = context.config.train.epochs
    if not epochs:
        return context
    assert not isinstance(data.source, Streams)
    counted = with_epochs_as_steps(context.config, data.source.num_rows)
    context.print_line(f"{epochs:g} epochs of {data.source.num_rows:,} rows: train.steps={counted.train.steps}")
    return replace(context, plan=replace(context.plan, config=counted))


def _prepare_folder(context: RunContext, state: TrainState) -> None:
    """Tidy the run's folder, check its space, and record the configuration; only once the start is not refused."""
    if not context.is_leader:
        return
    config, folder = context.config, context.config.run.dir
    if config.checkpoint.every:
        # The remains of a killed start, and the checkpoints due for deletion, must not fill the disk of this start.
        clear(folder / CHECKPOINTS_DIR)
        prune(folder / CHECKPOINTS_DIR, Retention(config.checkpoint.keep, config.checkpoint.keep_every))
        check_space(folder, state)
    (folder / CONFIG_FILE).write_text(dump(config), encoding="utf-8")
    record_environment(folder, context)


# 8 arguments: what the start found
def _train(
    context: RunContext,
    data: Data,
    inputs: RunInputs,
    state: TrainState,
    meta: Meta,
    mirrored: Mirrored | None,
    rollbacks: Rollbacks,
    others: Sequence[RunObserver] = (),
) -> float | None:
    """Train to the last step, and wait for the last checkpoint; returns the last held-out loss, if any."""
    config, backend, logs = context.config, context.backend, context.config.run.dir / LOGS_DIR
    guard = NumericsGuard(config, state, attempt=context.place.restarts, rollbacks=rollbacks)
    guard.begin(meta.step, meta.stability)
    goodput = None
    if context.is_leader:
        goodput = GoodputMeter(logs, context.print_line, context.began, config=fingerprint(dump(config)))
    on_saved = (goodput.saved,) if goodput else ()
    skips = tuple(skip for skip in rollbacks.skips if skip[0] >= meta.step)  # its samples count the earlier ones
    loader = train_loader(context, data, meta, skips)
    cursor = loader.cursor if isinstance(loader, StreamLoader) else None
    identity = RunIdentity(inputs, meta, data.tokenizer, guard.kept, cursor, skips)
    checkpoints = Checkpoints(context.plan, state, identity, context.print_line, mirrored, *on_saved)
    recompiles = Recompiles(backend, config.compile.max_recompiles)
    starts: RunObserver = goodput or RunObserver()
    if mirrored and mirrored.scope.leads and not context.is_leader:
        starts = StepFile(logs)
    timeline, divides = _timeline(config.metrics.step_sections, backend)
    work = WorkMeter(timeline, backend.diagnostics.peak_memory_bytes if context.is_leader else lambda: 0)
    fallbacks = Fallbacks(backend, allowed=config.compile.allow_fallbacks)
    watchdog = context.watchdog or RunObserver()
    observers = Observers(starts, watchdog, recompiles, fallbacks, checkpoints, work, _profiler(context), *others)
    flops = context.plan.family.flops_per_token(context.plan.model, config.train.seq_len)
    peak = backend.diagnostics.peak_flops()
    sinks = open_sinks(config, meta.step, context.is_leader)
    trainer = Trainer(
        config=config,
        state=state.reporting(observers.section) if divides else state,
        train=loader,
        validation=validation_loader(context, data),
        schedule=Schedule.of(config),
        meter=ThroughputMeter(flops, peak * context.mesh.world if peak else None, tokens=meta.tokens),
        sinks=sinks,
        checkpoints=checkpoints,
        guard=guard,
        observers=observers,
        gate=context.watchdog.gate if context.watchdog else StepGate(),
    )
    try:
        observed = _observed(context, observers, meta.step, work.spent)
        with explaining_memory(context, state), _draining(context, checkpoints), observed:
            val_loss = trainer.run(meta.step)
            recompiles.settle()
            context.drain()
            checkpoints.close(heartbeat=context.drain, stop_requested=lambda: context.is_stop_requested)
            return val_loss
    finally:
        for sink in sinks:
            sink.close()


def _profiler(context: RunContext) -> RunObserver:
    """Profiler of this rank, if configured."""
    metrics, rank = context.config.metrics, context.mesh.rank
    if not metrics.profile_steps or rank not in metrics.profile_ranks:
        return RunObserver()
    from nxtrain.train.step_profiler import StepProfiler  # torch's profiler takes time to import

    first, last = metrics.profile_steps
    return StepProfiler(first, last, context.config.run.dir / LOGS_DIR, rank, context.print_line, context.backend)


def _timeline(wanted: Literal["auto", "on", "off"], backend: Backend) -> tuple[WorkTimeline, bool]:
    """Timeline of this rank's work, and True if it divides the step into sections."""
    if not backend.is_asynchronous:
        return HostTimeline(backend.diagnostics.waited_s), wanted != "off"
    if wanted == "on" and backend.diagnostics.event() is not None:
        events = EventTimeline(lambda: cast("DeviceEvent", backend.diagnostics.event()))
        backend.diagnostics.on_wait(events.wait)
        return events, True
    return HostTimeline(backend.diagnostics.waited_s), False


@contextmanager
def _observed(
    context: RunContext, observers: RunObserver, finished: int, spent: Callable[[], Mapping[str, float]]
) -> Iterator[None]:
    """Report the begin and the end of the training to the observers; `spent` is this rank's time by kind of work."""
    observers.begin(finished)
    if context.watchdog is not None:
        context.watchdog.report_to(observers, spent)
    try:
        yield
    except BaseException as error:
        cause: BaseException = error
        if isinstance(error, Exception) and not isinstance(error, NxtrainError):
            cause = context.backend.failed(error)  # the error behind a library's error, such as a lost connection
        outcome: Outcome = "stopped" if isinstance(error, StoppedBySignal) else "failed"
        if context.watchdog is not None and isinstance(error, Exception) and outcome == "failed":
            context.watchdog.await_verdict(error)  # a peer may be lost because the run hangs
        observers.end(outcome, f"{type(cause).__name__}: {cause}")
        raise
    observers.end("done", "")


@contextmanager
def _draining(context: RunContext, checkpoints: Checkpoints) -> Iterator[None]:
    """Wait for the last checkpoint after an end on which all ranks agree; after other errors, ranks may be lost."""
    try:
        yield
    except (DivergedError, RestartError) as ended:
        context.drain()
        try:
            checkpoints.close(is_urgent=True, heartbeat=context.drain)
        except CheckpointError as error:
            context.print_line(f"WARNING: {error}")
        raise ended from None
    except StoppedBySignal:
        context.drain()
        checkpoints.close(is_urgent=True, heartbeat=context.drain)  # a stop without its checkpoint is a failure
        raise


def _announce(context: RunContext, reason: str) -> None:
    """Print the backend, the mesh, and notes of the backend and its layers."""
    backend, mesh = context.backend, context.mesh
    degrees = _describe_pipeline(context) + f"tp {mesh.tp_size}, dp {mesh.dp_size}" + _describe_sharding(context)
    context.print_line(f"backend {backend.name} ({reason}); {mesh.world} ranks: {degrees}")
    for note in dict.fromkeys((*backend.binding.notes(), *backend.notes())):
        context.print_line(note)
    if context.config.precision.params == "bf16" and (warning := backend.diagnostics.bf16_warning()):
        context.print_line(warning)


def _announce_start(context: RunContext, data: Data, meta: Meta) -> None:
    """Print the model, the data, and the step after which the run continues."""
    family, num_params = context.plan.family, context.plan.family.num_params(context.plan.model)
    seq_len = context.config.train.seq_len
    rows = (
        f"{data.source.num_documents:,} documents in"
        if isinstance(data.source, Streams)
        else f"{data.source.num_rows:,}"
    )
    origin = f"the weights of model.hf={context.config.model.hf}" if context.config.model.init == "hf" else "scratch"
    context.print_line(
        f"model {family.name}, {num_params:,} parameters; data {rows} rows of {seq_len} tokens; "
        + (f"continues after step {meta.step}" if meta.step else f"starts from {origin}")
    )


def _describe_pipeline(context: RunContext) -> str:
    parallel, size = context.config.parallel, context.mesh.pp_size
    if size == 1:
        return ""
    chunks = parallel.virtual_pp
    order = " (zero_bubble)" if parallel.schedule == "zero_bubble" else ""
    return f"pp {size}{f' of {chunks} chunks each' if chunks > 1 else order}, "


def _describe_sharding(context: RunContext) -> str:
    shard, size = context.config.parallel.shard, context.mesh.shard_size
    if shard == "none":
        return ""
    if size == 1:
        return f"; one rank holds all state, so that parallel.shard={shard} changes nothing"
    return f", state cut over {size} of them ({shard})"
