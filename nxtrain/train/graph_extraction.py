"""Graph extraction: a few steps on rows of zeros that reach every graph of a run and write no results.

Ahead-of-time compilation collects the graphs that a script reaches, while the device computes nothing. The extraction
does each kind of work twice, the second time on the results of the first. It neither branches on a value nor keeps one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nxtrain.backends.base import Backend
from nxtrain.backends.xla.environment import EXTRACTING, HOLDING
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig, TrainConfig
from nxtrain.data import BatchShare, Loader
from nxtrain.data.samples import AnswerRows, TableSamples
from nxtrain.metrics.meters import ThroughputMeter
from nxtrain.metrics.run_observer import RunObserver, Work
from nxtrain.optim.schedule import Schedule
from nxtrain.train.build import build_model, build_state
from nxtrain.train.health.numerics import NumericsGuard
from nxtrain.train.health.recompiles import GRAPHS
from nxtrain.train.start import settle, shards_of
from nxtrain.train.step import TrainState
from nxtrain.train.trainer import Trainer

STEPS = 4
"""The first step, a plain step, a step followed by all other work, and the last step, which repeats that work."""
_EVERY = 3
EVALUATED_BATCHES = 2
"""Two batches show whether both record the same graph."""

MICRO_BATCHES = 3
"""Micro-batches of a step without a pipeline: the first, one in between, and the last, which begins reductions."""


def extract_graphs(plan: Resolved, backend: Backend, mesh: Mesh, print_line: Callable[[str], None]) -> None:
    """Reach every graph of a run and of its resumption, without reading data or writing files.

    Args:
        plan: The checked configuration.
        backend: This rank's device, which computes nothing.
        mesh: The axes of this rank.
        print_line: Prints a line for the user; each piece of work is named before it begins.
    """
    done: list[str] = []

    def begin(work: str) -> None:
        print_line(f"{EXTRACTING} {work}")
        # Finds different graphs hours before a run would, and keeps all ranks at the work that was just named.
        backend.compare_graphs(work)

    class Announced(RunObserver):
        """Announces each piece of work."""

        def enter(self, step: int, work: Work) -> None:
            if work in GRAPHS:
                done.append(work)
                begin(f"step {step} ({work})")

    print_line("graphs are collected for compilation; nothing is computed, nothing is written")
    stages = mesh.stages_held(mesh.rank - backend.local_rank, backend.local_world)
    if stages:
        print_line(f"{HOLDING} {', '.join(map(str, stages))} of {mesh.pp_size}")
    state = build_state(plan, build_model(plan, backend, mesh, init="zeros"), backend, mesh)
    begin("start")
    backend.step_boundary()
    for beginning, weights_only in (("start from weights", True), ("resume", False)):
        begin(beginning)
        settle(state, shards_of(state), weights_only=weights_only)
        backend.step_boundary()
    short = _short(plan.config, mesh)
    trainer(plan, state, short, Schedule.constant(0.0), Announced()).run(0)
    reached = ", ".join(f"{work} {done.count(work)} times" for work in dict.fromkeys(done))
    line = f"reached the start, with and without a checkpoint, {reached}"
    if not plan.config.train.eval_every:
        line += "; no evaluation, since train.eval_every=0"
    if not plan.config.checkpoint.every:
        line += "; no checkpoint, since checkpoint.every=0"
    print_line(line)


def few_micro_batches(config: RunConfig, mesh: Mesh) -> TrainConfig:
    """Batch sizes with which every graph of a step is recorded, at most those of the run.

    A micro-batch is the same work whatever the number of micro-batches, since the division by tokens comes with the
    update. A pipeline gets enough micro-batches for its warmup, its steady state and its end, in groups of the run's
    sizes.
    """
    train, pp = config.train, config.parallel.pp
    rows = train.micro_batch * mesh.dp.size
    num_micro = train.global_batch // rows
    few = MICRO_BATCHES
    if pp > 1:
        few = 2 * pp * config.parallel.virtual_pp + num_micro % pp
    return train.model_copy(update={"global_batch": min(num_micro, few) * rows, "batch_ramp": ()})


@dataclass(frozen=True)
class CastOnly:
    """Saver that casts the tensors of a checkpoint on the device, and writes nothing."""

    state: TrainState

    def save(self, step: int, last: bool) -> None:
        """Run the casts of a checkpoint, whose graphs a save needs; nothing is written."""
        shards_of(self.state)
        self.state.backend.step_boundary()


def trainer(plan: Resolved, state: TrainState, config: RunConfig, schedule: Schedule, observer: RunObserver) -> Trainer:
    """Build the trainer of a run without data, records and files.

    Args:
        plan: The checked configuration.
        state: Model, optimizer and device.
        config: Number of steps, and the intervals of evaluation, checkpoints, votes and records.
        schedule: Learning rate of each step.
        observer: Observer of each piece of work.
    """
    return Trainer(
        config=config,
        state=state,
        train=_loader(config, state.mesh),
        sizes=config.train.batch_sizes(),
        validation=_loader(config, state.mesh) if config.train.eval_every else None,
        schedule=schedule,
        meter=ThroughputMeter(lambda step: 0, None),
        sinks=(),
        checkpoints=CastOnly(state),
        guard=NumericsGuard(config, state, heeds=False),
        observers=observer,
    )


def _short(config: RunConfig, mesh: Mesh) -> RunConfig:
    """The configuration with few steps, and with each kind of work that the run does at an interval of few steps."""

    def interval(every: int) -> int:
        return min(every, 1) * _EVERY

    train = few_micro_batches(config, mesh).model_copy(
        update={
            "steps": STEPS,
            "eval_every": interval(config.train.eval_every),
            "eval_batches": min(config.train.eval_batches, EVALUATED_BATCHES),
        }
    )
    return config.model_copy(
        update={
            "train": train,
            "checkpoint": config.checkpoint.model_copy(update={"every": interval(config.checkpoint.every)}),
            "recovery": config.recovery.model_copy(update={"vote_every": interval(config.recovery.vote_every)}),
            "metrics": config.metrics.model_copy(update={"log_every": _EVERY}),
        }
    )


def _loader(config: RunConfig, mesh: Mesh) -> Loader:
    return Loader(
        TableSamples(
            np.zeros((config.train.global_batch * EVALUATED_BATCHES, config.train.seq_len + 1), np.int8),
            answers=AnswerRows.of(config.finetune),
            has_reference=config.finetune.stores_reference,
            teacher_k=config.data.teacher_k,
        ),
        BatchShare(config.train.global_batch, config.train.micro_batch, mesh.dp.rank, mesh.dp.size),
        seed=0,
        shuffle=False,
        doc_mask=config.data.doc_mask,
    )
