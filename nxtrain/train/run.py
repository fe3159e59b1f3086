"""A whole run on one rank: from a loaded configuration to the last checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from nxtrain.backends import choose, choose_layers, open_backend
from nxtrain.backends.base import AttentionShape, Backend
from nxtrain.checkpoint.directory import Retention, clear, prune
from nxtrain.checkpoint.mirror import open_mirrored
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import Loaded
from nxtrain.config.schema import RunConfig
from nxtrain.config.show import dump
from nxtrain.data import Loader, Samples, open_data, unigram_entropy
from nxtrain.distributed.agreement import Ranks
from nxtrain.errors import CheckpointError, DivergedError, RestartError, StoppedBySignal
from nxtrain.mesh import Mesh
from nxtrain.metrics.attempts import Attempts, Reached
from nxtrain.metrics.goodput_meter import GoodputMeter
from nxtrain.metrics.meters import ThroughputMeter
from nxtrain.metrics.sinks import open_sinks
from nxtrain.optim.schedule import Schedule
from nxtrain.process.clock import Instant, now
from nxtrain.process.console import PipeSafeConsole, standard_error
from nxtrain.process.deadlines import CLOSING_S, close_with_deadline, open_with_deadline
from nxtrain.process.signals import Signals
from nxtrain.run_folder import CHECKPOINTS_DIR, CONFIG_FILE, DATA_DIR, LOGS_DIR, SUMMARY_FILE
from nxtrain.train.build import mesh_of
from nxtrain.train.checkpoints import Checkpoints
from nxtrain.train.compatibility import RunInputs
from nxtrain.train.graph_extraction import extract_graphs
from nxtrain.train.health.numerics import NumericsGuard
from nxtrain.train.health.recompiles import Recompiles
from nxtrain.train.start import is_restart, start
from nxtrain.train.supervision.course import Course
from nxtrain.train.supervision.preflight import check_folder, check_space
from nxtrain.train.supervision.run_lock import only_run
from nxtrain.train.supervision.watchdog import RESTORE, Watchdog
from nxtrain.train.tokenizer import tokenizer_of_weights
from nxtrain.train.trainer import Trainer, Work, unmetered


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
    began = began or now()
    name, reason = choose(loaded.config.backend.name)
    chosen = loaded.config.backend
    layers, why = choose_layers(chosen.layers, name, allow_unverified=chosen.allow_unverified)
    recovery = loaded.config.recovery
    limit_s = recovery.hang_timeout_s
    backend = open_with_deadline(lambda: open_backend(name, limit_s, layers), limit_s)
    ended: BaseException | None = None
    try:
        reason += f"; layers {layers}: {why}" if why else ""
        plan = resolve_config(loaded, backend.world, backend.name)
        logs = plan.config.run.dir / LOGS_DIR
        # Only the leader locks the folder, and not for a run that only extracts graphs.
        folder, is_again = plan.config.run.dir, is_restart(os.environ)
        lock = only_run(folder, standard_error().print, restarted=is_again, most_s=0.5 * limit_s)
        watches = Watchdog(backend, limit_s, logs, signals or Signals())
        with watches as watchdog, nullcontext() if backend.rank or backend.extracts else lock:
            train_on(backend, plan, reason, watchdog, began)
    except BaseException as error:
        ended = error
        if isinstance(error, Exception) and not isinstance(error, StoppedBySignal):
            ended = backend.failed(error)
        if ended is error:
            raise
        raise ended from error
    finally:
        close_with_deadline(backend.close, min(limit_s, CLOSING_S), ended)


def train_on(
    backend: Backend,
    plan: Resolved,
    reason: str,
    watchdog: Watchdog | None = None,
    began: Instant | None = None,
) -> None:
    """Train on an open backend.

    Args:
        backend: This rank's device.
        plan: The checked configuration.
        reason: Reason for the choice of the backend and its layers.
        watchdog: Watchdog of this rank; None: there is none.
        began: Time when this attempt of the run began; None: now.
    """
    began = began or now()
    config = plan.config
    batches = config.train
    mesh = mesh_of(plan, backend)
    leader = mesh.rank == 0
    print_line = standard_error(quiet=not leader).print
    degrees = (
        _describe_pipeline(config, mesh) + f"tp {mesh.tp_size}, dp {mesh.dp_size}" + _describe_sharding(config, mesh)
    )
    print_line(f"backend {backend.name} ({reason}); {mesh.world} ranks: {degrees}")
    backend.allow_unverified = config.backend.allow_unverified
    backend.choose_attention(config.backend.attention, AttentionShape.of(config, *plan.family.heads(plan.model)))
    for note in dict.fromkeys((*backend.binding.notes(), *backend.notes())):
        print_line(note)
    if backend.extracts:
        # Printed on every node, since the compiler's tool on each node reads the lines of that node's ranks.
        extract_graphs(
            plan, backend, mesh, PipeSafeConsole(stderr=True, soft_wrap=True, quiet=backend.local_rank != 0).print
        )
        return
    if watchdog is not None:
        stages = [mesh.pp.group_of(rank).index(rank) for rank in range(mesh.world)]
        watchdog.lay_out(mesh.words, stages)
    attempts = Attempts(config.run.dir, dump(config))
    mirrored = (
        open_mirrored(
            config.checkpoint.mirror,
            config.run.dir / CHECKPOINTS_DIR,
            Ranks(mesh, backend.host_group),
            backend.local_rank,
        )
        if config.checkpoint.mirror
        else None
    )
    if leader:
        check_folder(config.run.dir)
        attempts.refuse_loop(config.recovery.max_same_step)
    data = open_data(
        config.data,
        seq_len=batches.seq_len,
        vocab_size=plan.model.vocab_size,
        workdir=config.run.dir / DATA_DIR,
        leader=mirrored.scope.leads if mirrored else leader,
        barrier=backend.collectives.barrier,
        of_weights=lambda: tokenizer_of_weights(config, config.run.dir / DATA_DIR),
    )
    if data.tokenizer_origin:
        print_line(f"the tokenizer is that of {data.tokenizer_origin}, whose ids the weights know")
    if data.skipped:
        print_line(f"left out {len(data.skipped)} files that are no text, such as {data.skipped[0]}")
    inputs = RunInputs.of(data.fingerprint, data.tokenizer, data.end_of_text, trained=data.trained)
    if watchdog is not None:
        watchdog.enter(0, RESTORE)
    state, meta = start(plan, backend, mesh, inputs, print_line, mirrored)
    if watchdog is not None:
        watchdog.enter(meta.step, "start")
    print_line(
        f"model {plan.family.name}, {state.num_params:,} parameters; data {data.train.num_rows:,} rows of "
        f"{batches.seq_len} tokens; " + (f"continues after step {meta.step}" if meta.step else "starts from scratch")
    )

    if leader and config.checkpoint.every:
        # The remains of a killed start, and the checkpoints due for deletion, must not fill the disk of this start.
        clear(config.run.dir / CHECKPOINTS_DIR)
        prune(config.run.dir / CHECKPOINTS_DIR, Retention(config.checkpoint.keep, config.checkpoint.keep_every))
        check_space(config.run.dir, state)
    if leader:  # only here: a refused start must not overwrite the run's recorded settings with its own
        (config.run.dir / CONFIG_FILE).write_text(dump(config), encoding="utf-8")

    def loader(samples: Samples, *, shuffle: bool, past_end: Literal["wrap", "pad"], origin: int = 0) -> Loader:
        return Loader(
            samples,
            seed=config.run.seed,
            shuffle=shuffle,
            global_batch=batches.global_batch,
            micro_batch=batches.micro_batch,
            dp_rank=mesh.dp.rank,
            dp_size=mesh.dp.size,
            origin=origin,
            past_end=past_end,
        )

    flops = plan.family.flops_per_token(plan.model, batches.seq_len)
    peak = backend.peak_flops()
    recompiles = Recompiles(backend, config.compile.max_recompiles)
    goodput = GoodputMeter(config.run.dir / LOGS_DIR, print_line, began) if leader else None
    other_disk = Reached(config.run.dir) if mirrored and mirrored.scope.leads and not leader else None
    course = Course(meta.step, watchdog, attempts if leader else None, goodput, other_disk, backend.failed)
    guard = NumericsGuard(config, state)
    guard.begin(meta.step, meta.stability)

    def watch(step: int, work: Work) -> None:
        course.enter(step, work)
        recompiles.enter(step, work)
        checkpoints.report()

    sinks = open_sinks(config.metrics, config.run.dir, batches.steps, meta.step, leader)
    on_saved = (goodput.saved,) if goodput else ()
    checkpoints = Checkpoints(plan, state, inputs, meta, data.tokenizer, guard.kept, print_line, mirrored, *on_saved)
    try:
        with course:
            trainer = Trainer(
                config=config,
                state=state,
                train=loader(
                    data.train,
                    shuffle=config.data.shuffle,
                    past_end="wrap",
                    origin=meta.samples - meta.step * batches.global_batch,
                ),
                validation=loader(data.validation, shuffle=False, past_end="pad") if data.validation else None,
                schedule=Schedule.of(plan.config),
                meter=ThroughputMeter(flops, peak * mesh.world if peak else None, tokens=meta.tokens),
                sinks=sinks,
                save=checkpoints.save,
                guard=guard,
                watch=watch,
                goodput=goodput.log if goodput else unmetered,
                stops=course.stops,
            )
            val_loss = trainer.run(meta.step)
            recompiles.end()
            course.close()
            checkpoints.close(alive=course.close, asked=lambda: watchdog is not None and watchdog.is_asked)
    except (DivergedError, RestartError) as ended:
        course.close()
        try:
            checkpoints.close(
                soon=True, alive=course.close
            )  # all ranks end here, so they can wait for the last checkpoint together
        except CheckpointError as error:
            print_line(f"WARNING: {error}")
        raise ended from None
    except StoppedBySignal:
        course.close()
        checkpoints.close(soon=True, alive=course.close)  # a stop without its checkpoint is a failure
        raise
    finally:
        for sink in sinks:
            sink.close()
    if leader and val_loss is not None and data.validation is not None:
        evaluated = batches.eval_batches * batches.global_batch
        _summarize(config.run.dir, val_loss, unigram_entropy(data.validation, evaluated), print_line)


def _describe_pipeline(config: RunConfig, mesh: Mesh) -> str:
    if mesh.pp_size == 1:
        return ""
    chunks = config.parallel.virtual_pp
    order = " (zero_bubble)" if config.parallel.schedule == "zero_bubble" else ""
    return f"pp {mesh.pp_size}{f' of {chunks} chunks each' if chunks > 1 else order}, "


def _describe_sharding(config: RunConfig, mesh: Mesh) -> str:
    if config.parallel.shard == "none":
        return ""
    if mesh.shard_size == 1:
        return f"; one rank holds all state, so that parallel.shard={config.parallel.shard} changes nothing"
    return f", state cut over {mesh.shard_size} of them ({config.parallel.shard})"


def _summarize(folder: Path, val_loss: float, entropy: float, print_line: Callable[[str], None]) -> None:
    """Write and print the held-out loss beside the unigram entropy, the best loss of a model without context."""
    summary = {"val_loss": val_loss, "unigram_entropy": entropy}
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_line(
        f"held-out loss {val_loss:.4f} nats per token (perplexity {math.exp(val_loss):.1f}); unigram entropy of the "
        f"same tokens {entropy:.4f} (perplexity {math.exp(entropy):.1f})"
    )
