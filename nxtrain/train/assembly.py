"""Assembly of a run on one rank, from an open context to a `Run` that is ready to train."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import cast

from torch import nn

from nxtrain.backends.diagnostics import DeviceEvent
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror import Mirrored, open_mirrored
from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.process.clock import now
from nxtrain.common.run_folder import CHECKPOINTS_DIR, LOGS_DIR
from nxtrain.config.duration import with_epochs_as_steps
from nxtrain.config.show import dump
from nxtrain.data import Data
from nxtrain.data.loader import RowPositions
from nxtrain.metrics.goodput_meter import GoodputMeter
from nxtrain.metrics.meters import ThroughputMeter
from nxtrain.metrics.run_observer import Observers, RunObserver
from nxtrain.metrics.sinks import open_sinks
from nxtrain.metrics.start_log import StepFile
from nxtrain.metrics.work_meter import EventTimeline, HostTimeline, WorkMeter, WorkTimeline
from nxtrain.optim.schedule import Schedule
from nxtrain.parallel.float8 import layers_in_float8
from nxtrain.plan.adapters import Adapters, num_adapter_params
from nxtrain.train.checkpoints import Checkpoints, RunIdentity
from nxtrain.train.compatibility import RunInputs, refuse_other_commits
from nxtrain.train.context import RunContext
from nxtrain.train.health.fallbacks import Fallbacks
from nxtrain.train.health.initial_norm import measure_initial_norm
from nxtrain.train.health.numerics import NumericsGuard
from nxtrain.train.health.recompiles import Recompiles
from nxtrain.train.health.rollbacks import Rollbacks
from nxtrain.train.rank_memory import RankMemory, StepNumbers, WatchedRun
from nxtrain.train.results import base_fingerprint
from nxtrain.train.run import Run
from nxtrain.train.run_data import lengths_after, open_run_data, train_batches, validation_loader
from nxtrain.train.start import start
from nxtrain.train.step import TrainState
from nxtrain.train.supervision.coordinated_stop import StepGate
from nxtrain.train.supervision.preflight import check_folder, fingerprint, prepare_folder, refuse_crash_loop
from nxtrain.train.trainer import Trainer


def _with_reference(context: RunContext, data: Data) -> Data:
    """Add the reference's log-probabilities to the data, if the objective compares with a stored reference."""
    if not context.config.finetune.stores_reference:
        return data
    from nxtrain.train.reference import with_reference  # imports pyarrow, which other runs do not need

    return with_reference(context, data)


def assemble(context: RunContext, memory: RankMemory) -> Run:
    """Open the data, fill the training state, and build the parts of the run."""
    if context.config.model.hf:
        refuse_other_commits(context.ranks.gather(context.config.model.hf))
    mirrored = _claim_folder(context)
    data = open_run_data(context, mirrored)
    context = _with_steps(context, data)
    config, backend = context.config, context.backend
    data = _with_reference(context, data)
    inputs = _inputs(context, data)
    context.enter(0, "restore")
    rollbacks = Rollbacks(config.run.dir, context.ranks)
    state, begun, is_drawn = start(context, inputs, mirrored, rollbacks, memory)
    resumed = memory.resumed or StepNumbers(begun, saved_step=begun.step)
    initial_norm = _measured(context, state) if is_drawn else resumed.initial_norm
    sizes = config.train.batch_sizes(begun.step, begun.tokens)
    rollbacks.resume(begun.step, sizes)
    context.enter(begun.step, "start")
    _announce_start(context, data, begun, state.model)
    prepare_folder(context, state)

    rows = _rows(begun, rollbacks, sizes)
    guard = NumericsGuard(config, state, attempt=context.placement.restarts, rollbacks=rollbacks, rows=rows)
    guard.begin(begun.step, begun.stability, resumed.reading)
    batches = train_batches(context, data, begun, rows.skips)
    identity = RunIdentity(inputs, begun, resumed.saved_step, data.tokenizer, guard.kept, batches.cursor, rows.skips)
    goodput = _goodput_meter(context)
    checkpoints = Checkpoints(context.plan, state, identity, context.print_line, mirrored, goodput)
    recompiles = Recompiles(backend, config.compile.max_recompiles)
    work, has_sections = _work_meter(context)
    observers = Observers(
        goodput or _step_file(context, mirrored),
        *context.observers,
        recompiles,
        Fallbacks(backend, allowed=config.compile.allow_fallbacks),
        checkpoints,
        work,
        _profiler(context),
        initial_norm,
        memory,
    )
    if has_sections:
        state = state.reporting(observers.section)
    if not batches.cursor():  # positions in packed data are lost with their rank
        state = memory.watch(WatchedRun(state, guard, checkpoints, initial_norm), begun.step)
    trainer = Trainer(
        config=config,
        state=state,
        train=batches,
        sizes=sizes,
        validation=validation_loader(context, data),
        schedule=Schedule.of(config, begun.rewarm_after),
        meter=_throughput_meter(context, resumed),
        sinks=open_sinks(config, resumed.recorded_step, context.is_leader, has_experts=state.loads is not None),
        checkpoints=checkpoints,
        guard=guard,
        observers=observers,
        gate=context.watchdog.gate if context.watchdog else StepGate(),
        updated=memory.updated,
        unfinished=resumed.result,
    )
    return Run(context, data, inputs, begun, trainer, checkpoints, recompiles, work)


def _rows(begun: Meta, rollbacks: Rollbacks, sizes: BatchSizes) -> RowPositions:
    """Positions of the rows of all steps after the beginning of this start."""
    skips = tuple(skip for skip in rollbacks.skips if skip[0] >= begun.step)  # `begun.samples` counts earlier skips
    return RowPositions(sizes, skips, begun.samples - sizes.before(begun.step))


def _inputs(context: RunContext, data: Data) -> RunInputs:
    """Identity of the data and of the frozen weights; refuses a run in a crash loop first."""
    config = context.config
    if context.is_leader:
        refuse_crash_loop(config.run.dir / LOGS_DIR, _fingerprint(context), config.recovery.max_same_step)
    base = context.ranks.on_leader(lambda: base_fingerprint(config), "cannot read the frozen weights")
    return RunInputs.of(data.fingerprint, data.tokenizer, data.end_of_text, trained=data.trained, base=base)


def _measured(context: RunContext, state: TrainState) -> RunObserver:
    """Observer that reports the initial norm of newly drawn weights."""
    initial_norm, line = measure_initial_norm(state)
    context.print_line(line)
    return initial_norm


def _fingerprint(context: RunContext) -> str:
    """Fingerprint of the configuration, by which the starts of a crash loop are recognized."""
    return fingerprint(dump(context.config))


def _claim_folder(context: RunContext) -> Mirrored | None:
    """Open the mirror of the run's folder, if configured, and refuse a folder in which the run cannot start."""
    config, mirrored = context.config, None
    if config.checkpoint.mirror:
        folder = config.run.dir / CHECKPOINTS_DIR
        mirrored = open_mirrored(config.checkpoint.mirror, folder, context.ranks, context.backend.local_rank)
    if context.is_leader:
        check_folder(config.run.dir)
    return mirrored


def _with_steps(context: RunContext, data: Data) -> RunContext:
    """Context with `train.epochs` converted to steps, once the number of rows is known."""
    epochs = context.config.train.epochs
    if not epochs:
        return context
    num_rows = data.source.num_rows
    assert num_rows is not None, "config/duration.py refuses epochs of rows without an end"
    config = with_epochs_as_steps(context.config, num_rows)
    context.print_line(f"{epochs:g} epochs of {num_rows:,} rows: train.steps={config.train.steps}")
    return replace(context, plan=replace(context.plan, config=config))


def _announce_start(context: RunContext, data: Data, meta: Meta, model: nn.Module) -> None:
    """Print the model, the data, and the step after which the run continues."""
    config, family = context.config, context.plan.family
    beginning = "starts from scratch"
    if meta.step:
        beginning = f"continues after step {meta.step}"
    elif config.model.init == "hf":
        beginning = f"starts from the weights of model.hf={config.model.hf}"
    dimensions, trained = context.plan.dimensions, ""
    if config.finetune.adapts:
        number = num_adapter_params(dimensions, Adapters(config.finetune.r, config.finetune.targets))
        trained = f", frozen, below {config.finetune.method} adapters of {number:,}"
    context.print_line(
        f"model {family.name}, {dimensions.num_params:,} parameters{trained}; "
        f"data {data.source.describe()} of {config.train.seq_len} tokens; {beginning}"
    )
    if meta.step >= config.train.steps:
        context.print_line(
            f"step {meta.step} is trained already, and train.steps={config.train.steps}: no step is left; to train on, "
            "give a larger train.steps"
        )
    if config.precision.fp8 != "none":
        number, others = layers_in_float8(model)
        line = f"float8: {number} linear layers of this rank's blocks; all other products in {config.precision.params}"
        if others:
            line += f", those of layers with sizes that do not fit among them: {', '.join(others)}"
        context.print_line(line)


def _goodput_meter(context: RunContext) -> GoodputMeter | None:
    """Goodput meter that records the starts of the run; None on other ranks than the leader."""
    if not context.is_leader:
        return None
    logs = context.config.run.dir / LOGS_DIR
    return GoodputMeter(logs, context.print_line, context.began, config=_fingerprint(context))


def _step_file(context: RunContext, mirrored: Mirrored | None) -> RunObserver:
    """Observer that writes the last finished step to each disk that the leader does not share."""
    if mirrored is None or not mirrored.scope.leads:
        return RunObserver()
    return StepFile(context.config.run.dir / LOGS_DIR)


def _throughput_meter(context: RunContext, resumed: StepNumbers) -> ThroughputMeter:
    train = context.config.train
    tokens = resumed.meta.tokens
    ago_s = 0.0
    peak = context.backend.diagnostics.peak_flops(context.config.precision.params)
    if peak:
        peak *= context.mesh.world
    if resumed.result is not None:  # the last update's record is written again, with its tokens and the time lost
        tokens -= train.batch_sizes(resumed.meta.step, tokens).at(resumed.meta.step - 1) * train.seq_len
        ago_s = now().since(context.began)
    lengths = lengths_after(context, resumed.meta)
    flops_of_length = cache(context.plan.dimensions.flops_per_token)
    return ThroughputMeter(
        lambda step: flops_of_length(train.seq_len if lengths is None else lengths.at(step - 1)),
        peak or None,
        tokens=tokens,
        ago_s=ago_s,
    )


def _work_meter(context: RunContext) -> tuple[WorkMeter, bool]:
    """Meter of this rank's time by kind of work, and True if the meter divides steps into sections."""
    backend, wanted = context.backend, context.config.metrics.step_sections
    timeline: WorkTimeline = HostTimeline(backend.diagnostics.waited_s)
    has_sections = not backend.is_asynchronous and wanted != "off"
    if backend.is_asynchronous and wanted == "on" and backend.diagnostics.event() is not None:
        events = EventTimeline(lambda: cast("DeviceEvent", backend.diagnostics.event()))
        backend.diagnostics.on_wait(events.wait)
        timeline, has_sections = events, True
    if context.is_leader:
        return WorkMeter(timeline, backend.diagnostics.peak_memory_bytes), has_sections
    return WorkMeter(timeline), has_sections


def _profiler(context: RunContext) -> RunObserver:
    """Step profiler of this rank, if configured; otherwise an observer that does nothing."""
    metrics, rank = context.config.metrics, context.mesh.rank
    if not metrics.profile_steps or rank not in metrics.profile_ranks:
        return RunObserver()
    from nxtrain.train.step_profiler import StepProfiler  # torch's profiler takes time to import

    first, last = metrics.profile_steps
    return StepProfiler(first, last, context.config.run.dir / LOGS_DIR, rank, context.print_line, context.backend)
