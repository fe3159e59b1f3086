"""Training loop: steps, records, evaluations, votes and checkpoints at their configured intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.errors import StoppedBySignal
from nxtrain.config.schema import RunConfig
from nxtrain.data.batch_source import Batches
from nxtrain.data.loader import Batch, Loader
from nxtrain.metrics.meters import StepRecord, ThroughputMeter, Verdict
from nxtrain.metrics.routers import ROUTER_NUMBERS, Loads, router_numbers
from nxtrain.metrics.run_observer import RunObserver
from nxtrain.metrics.sinks import Sink
from nxtrain.optim.schedule import Schedule
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.health.numerics import NumericsGuard
from nxtrain.train.preferences import mean_of
from nxtrain.train.step import StepResult, TrainState, eval_step, train_step
from nxtrain.train.supervision.coordinated_stop import StepGate

ROUTERS = ("aux_loss", "router_z_loss")
"""Keys of the routers' losses in a step's record."""


class SavesCheckpoints(Protocol):
    """Interface of a writer of checkpoints of the training state."""

    def save(self, step: int, last: bool) -> None:
        """Save the state after a step; if `last`, wait until the write has ended."""


@dataclass(frozen=True)
class Trainer:
    """Training loop of one rank.

    Args:
        config: Number of steps, and the intervals of evaluation, checkpoints, votes and records.
        state: Model, optimizer and device.
        train: Batches to train on.
        sizes: Global batch of each step.
        validation: Batches to evaluate on; None for no evaluation.
        schedule: Learning-rate schedule.
        meter: Throughput meter.
        sinks: Destinations of the records.
        checkpoints: Writer of checkpoints.
        guard: Guard that reacts to numbers that are not finite, spikes and divergence.
        observers: Observers of the run.
        gate: Gate before each step, at which all ranks stop after the same step if the run has to stop.
        updated: Called with a step and its result after the update.
        unfinished: Result of the last finished update if its record, evaluation and checkpoint are still to be made;
            None if they are finished.
    """

    config: RunConfig
    state: TrainState
    train: Batches
    sizes: BatchSizes
    validation: Loader | None
    schedule: Schedule
    meter: ThroughputMeter
    sinks: Sequence[Sink]
    checkpoints: SavesCheckpoints
    guard: NumericsGuard
    observers: RunObserver = field(default_factory=RunObserver)
    gate: StepGate = field(default_factory=StepGate)
    updated: Callable[[int, StepResult], None] = lambda step, result: None
    unfinished: StepResult | None = None

    def run(self, finished: int) -> float | None:
        """Train from the step after `finished` to the last step; return the last held-out loss, or None.

        Raises:
            DivergedError: Losses, gradients or parameters are not finite or grow, and the configured policy ends the
                run.
            RestartError: The run must restart from its newest checkpoint.
            StoppedBySignal: The run stopped because of a signal; the state of its last step is saved if checkpoints are
                enabled.
        """
        total, val_loss = self.config.train.steps, None
        # Loaded values become device buffers like a step's results, so the first step has the graph of all others.
        self.state.backend.step_boundary()
        if self.unfinished is not None:
            val_loss = self._conclude(finished, self.unfinished)
        elif finished < total and self._finish(finished):
            raise StoppedBySignal(f"stopped before step {finished + 1}, the first of this start; start it again")
        with closing(self.train.prefetched(finished)) as batches:
            for step, batch in zip(range(finished + 1, total + 1), batches, strict=False):
                self.observers.enter(step, "training")
                result = update(self.state, self._put(batch), self.schedule.at(step))
                self.updated(step, result)
                of_step = self._conclude(step, result)
                val_loss = val_loss if of_step is None else of_step
        return val_loss

    def _conclude(self, step: int, result: StepResult) -> float | None:
        """Do the work due after a step: vote, record, evaluation and checkpoint; return the held-out loss or None."""
        config = self.config
        total = self.config.train.steps
        rate = self.schedule.at(step)
        # All positions of the rows, since the devices compute all; `targets` of a record are those in the loss.
        self.meter.add_step(step, self.sizes.at(step - 1) * config.train.seq_len)
        val_loss = None
        evaluates = self.validation is not None and _due(step, config.train.eval_every, total)
        saves = _due(step, config.checkpoint.every, total)
        self._compare(step, saves=saves)
        logs = evaluates or saves or step == 1 or _due(step, config.metrics.log_every, total)
        if logs:
            read, verdict = self._read(step, result, rate)
            throughput = self.meter.read()
            with self.meter.paused():
                others = {key: read.pop(key) for key in (*ROUTERS, *ROUTER_NUMBERS) if key in read}
                if evaluates:
                    val_loss, of_pairs = self.evaluate(step)
                    others |= of_pairs
                if self.state.preferences is not None:
                    others |= self.state.preferences.means(read)
                record = StepRecord(
                    step=step,
                    targets=int(read.pop("targets")),
                    lr=rate,
                    throughput=throughput,
                    val_loss=val_loss,
                    verdict=verdict,
                    **read,
                    measured={**others, **self.observers.measure(step), **self.train.progress(step)},
                )
                for sink in self.sinks:
                    sink.log(record.line())
                if saves:
                    self.observers.enter(step, "checkpoint")
                    self.checkpoints.save(step, step == total)
        if self._finish(step) and step < total:
            self._stop(step, result, rate, logged=logs, saved=saves)
        return val_loss

    def _finish(self, step: int) -> bool:
        """Finish a step; return True if the run stops after it, otherwise begin the wait for the next step's data."""
        self.observers.finish(step)
        if self.gate.stops(step):
            return True
        self.observers.enter(step + 1, "data")
        return False

    def _stop(self, step: int, result: StepResult, lr: float, *, logged: bool, saved: bool) -> NoReturn:
        """Save the state and end the run; if no record is due for the step, check its numbers but record nothing."""
        if not self.config.checkpoint.every:
            raise StoppedBySignal(f"stopped after step {step}; nothing is saved, since checkpoint.every=0")
        if not saved:
            self._compare(step, saves=True)
        if not logged:
            self._read(step, result, lr, recorded=False)
        self.observers.enter(step, "checkpoint")
        self.checkpoints.save(step, True)
        raise StoppedBySignal(f"stopped after step {step}, whose checkpoint is saved; the next start resumes there")

    def _read(
        self, step: int, result: StepResult, lr: float, *, recorded: bool = True
    ) -> tuple[dict[str, Any], Verdict]:
        """Fetch the numbers of a step from the device, with the numerics guard's verdict on them."""
        self.observers.enter(step, "log")
        preferences = self.state.preferences
        counted = "targets" if preferences is None else preferences.sums[1]
        numbers = {"loss": result.loss, counted: result.num_tokens, "grad_norm": result.grad_norm}
        if self.state.noise is not None:
            numbers["noise_scale"] = self.state.noise.value()
        numbers |= {**result.others, **self.guard.values()}
        if result.routing is not None:
            numbers |= dict(zip(ROUTERS, result.routing, strict=True))
        if result.loads is not None:
            numbers["loads"] = result.loads
        read = self.state.backend.fetch({**numbers, **self._health(lr)})
        loads: Loads = ()
        if result.loads is not None:
            entries = [read.pop(f"loads_{i}") for i in range(result.loads.numel())]
            width = result.loads.shape[1]
            loads = [entries[i : i + width] for i in range(0, len(entries), width)]
        verdict = self.guard.judge(step, read, loads, recorded=recorded)
        if loads:
            read |= router_numbers(loads)
        return read, verdict

    def _compare(self, step: int, *, saves: bool) -> None:
        """Compare the replicas of the state if a vote is due."""
        if self.guard.votes_at(step, saves=saves):
            self.observers.enter(step, "vote")
            self.guard.vote(step)

    def evaluate(self, step: int) -> tuple[float, dict[str, float]]:
        """Mean loss over the held-out tokens or pairs after a step, and the means over pairs by record key.

        A mean over no token and no pair is NaN.

        Evaluations of a run have the same first `eval_batches` global batches.
        """
        assert self.validation is not None
        self.observers.enter(step, "evaluation")
        backend = self.state.backend
        preferences = self.state.preferences
        sums = dict.fromkeys(("loss", "targets") if preferences is None else preferences.sums, 0.0)
        for index in range(min(self.config.train.eval_batches, self.validation.steps_per_epoch)):
            of_batch = eval_step(self.state, self._put(self.validation.batch(index)))
            for name, values in zip(sums, zip(*of_batch, strict=True), strict=True):
                numbers = backend.fetch({str(row): value for row, value in enumerate(values)})
                sums[name] += math.fsum(numbers.values())
        loss, num_tokens = sums.pop("loss"), sums.pop("targets")
        if preferences is None:
            return mean_of(loss, num_tokens), {}
        loss = mean_of(loss, sums[preferences.sums[1]])
        return loss, {f"val_{name}": mean for name, mean in preferences.means(sums).items()}

    @torch.no_grad()
    def _health(self, lr: float) -> dict[str, Tensor]:
        """Early indicators of a failing run, as () float32 tensors: parameter norm and fraction of lost updates."""
        state = self.state
        lost = state.gradients.count(state.optimizer.lost_updates(*state.backend.scalars(lr)))
        return {
            "param_norm": state.gradients.norm(state.data_parallel.shards),
            "lost_update_frac": lost / state.num_params,
        }

    def _put(self, batch: Batch) -> DeviceBatch:
        return on_device(self.state, batch)


def on_device(state: TrainState, batch: Batch) -> DeviceBatch:
    """Upload this rank's part of a batch to the device."""
    put: Callable[[Tensor], Tensor] = state.backend.put
    inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    starts = None
    if batch.starts is not None:
        starts = torch.from_numpy(batch.starts)
    answers: dict[str, Tensor] | None = None
    if batch.answers is not None:
        named = vars(batch.answers).items()
        answers = {name: torch.from_numpy(array) for name, array in named if array is not None}
    padding = None
    if state.has_padding:
        assert batch.padding is not None, "batches of packed rows have a padding mask"
        padding = torch.from_numpy(batch.padding)
    tokens_axis = state.mesh.tp if state.sequence_parallel else None
    given = (put, starts, state.context_parallel, answers, padding, tokens_axis)
    on_rank = DeviceBatch.of(inputs, targets, *given)
    if batch.swapped is not None:
        on_rank = replace(on_rank, swapped=on_device(state, batch.swapped))
    return on_rank


def update(state: TrainState, batch: DeviceBatch, lr: float) -> StepResult:
    """Run one training step, and submit its graph to a lazy device."""
    result = train_step(state, batch, lr)
    state.backend.step_boundary()
    return result


def _due(step: int, every: int, total: int) -> bool:
    """True if work that is done every `every` steps, and after the last step, is due; always False if `every` is 0."""
    return every > 0 and (step % every == 0 or step == total)
