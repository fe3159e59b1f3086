"""Graph extraction: a few steps on rows of zeros that record every graph of a run and write no results.

Ahead-of-time compilation collects the graphs that a script records, while the device computes nothing. The extraction
does each kind of work twice, the second time on the results of the first. No code may branch on a value or store one.
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
"""Number of extracted steps: the first, a plain step, a step followed by all other work, and a repetition."""
_EVERY = 3
EVALUATED_BATCHES = 2
"""Number of evaluated batches; two show that both record the same graph."""

MICRO_BATCHES = 3
"""Micro-batches of a step without a pipeline: the first, a middle one, and the last, which starts the reduction."""


def extract_graphs(plan: Resolved, backend: Backend, mesh: Mesh, print_line: Callable[[str], None]) -> None:
    """Record every graph of a run and of its resumption, without reading data or writing files.

    Args:
        plan: Validated configuration.
        backend: This rank's device, which computes nothing.
        mesh: The axes of this rank.
        print_line: Prints a line for the user; each kind of work is named before it begins.
    """
    done: list[str] = []

    def begin(work: str) -> None:
        print_line(f"{EXTRACTING} {work}")
        # Finds graphs that differ between ranks before a run does, and keeps all ranks at the same kind of work.
        backend.compare_graphs(work)

    class Announced(RunObserver):
        """Observer that prints each kind of work before it begins."""

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
    """Training configuration with fewer micro-batches, with which every graph of a step is still recorded.

    A micro-batch records the same graph for any number of micro-batches, since the division by tokens is part of the
    update. A pipeline gets enough micro-batches for its warm-up, its steady state and its end, in groups of the run's
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
    """Checkpoint writer that casts the tensors of a checkpoint on the device, and writes nothing."""

    state: TrainState

    def save(self, step: int, last: bool) -> None:
        """Record the casts of a checkpoint, whose graphs a real save needs; write nothing."""
        shards_of(self.state)
        self.state.backend.step_boundary()


def trainer(plan: Resolved, state: TrainState, config: RunConfig, schedule: Schedule, observer: RunObserver) -> Trainer:
    """Build a trainer that reads no data and writes no records or files.

    Args:
        plan: Validated configuration.
        state: Model, optimizer and device.
        config: Number of steps, and the intervals of evaluation, checkpoints, votes and records.
        schedule: Learning-rate schedule.
        observer: Observer of each kind of work.
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
        guard=NumericsGuard(config, state, acts=False),
        observers=observer,
    )


def _short(config: RunConfig, mesh: Mesh) -> RunConfig:
    """Configuration with few steps, in which all periodic work of the run occurs at an interval of few steps."""

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
