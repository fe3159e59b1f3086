"""In-memory recovery: the training state after a rank's last update, from which a run continues when a peer is lost.

An update follows the reductions over all ranks. So when a rank is lost, the others differ by one update at most. The
run continues from the newest step whose whole state the survivors hold together. A rank without this step's state
receives the tensors from a replica. Such a rank is the replacement, or a survivor that is one update behind or was in
the middle of one.

Nothing is copied during training: the memory refers to the state itself, which a step changes only in its update. On an
asynchronous device, the host starts the update only after the reductions have arrived, since the sums of a group that
has lost a rank are wrong. There, the state is copied to host memory after the run has ended. The record, evaluation and
checkpoint of the step are repeated if a survivor had not finished them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.shards import Shards
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.mesh import spans
from nxtrain.metrics.run_observer import RunObserver, Section
from nxtrain.train.health.numerics import NumericsGuard, Reading
from nxtrain.train.step import StepResult, TrainState


@dataclass(frozen=True)
class HeldStep:
    """Step whose state a rank holds in memory, and True if its record, evaluation and checkpoint are finished."""

    step: int
    is_finished: bool


@dataclass(frozen=True)
class AgreedStep:
    """Agreement of all ranks on the step from whose in-memory state the run continues.

    Args:
        step: Number of finished updates.
        holders: Ranks that hold the state of the step.
        is_finished: The record, evaluation and checkpoint of the step are finished.
    """

    step: int
    holders: frozenset[int]
    is_finished: bool

    def __str__(self) -> str:
        """Message about the step from which the run continues."""
        holders = spans(sorted(self.holders))
        return f"the state of step {self.step} comes from the memory of ranks {holders}, not from a checkpoint"


def agree(standings: Sequence[HeldStep | None], replicas: Iterable[Sequence[int]]) -> AgreedStep | None:
    """Newest step whose state some rank of each replica group holds in memory; None if there is no such step.

    The leader writes the files of a run. If the leader lost its memory, the step counts as not concluded.

    Args:
        standings: HeldStep of each rank; None for a rank whose memory holds no whole state.
        replicas: Groups of ranks that hold the same tensors.
    """
    groups = [*replicas]
    known = [(rank, standing) for rank, standing in enumerate(standings) if standing is not None]
    for step in sorted({standing.step for _, standing in known}, reverse=True):
        holders = frozenset(rank for rank, standing in known if standing.step == step)
        if all(holders.intersection(group) for group in groups):
            concluded = all(standing.is_finished for _, standing in known if standing.step == step)
            return AgreedStep(step, holders, concluded and 0 in holders)
    return None


@dataclass(frozen=True)
class StepNumbers:
    """Metadata and counters after an update, equal on all ranks, with their tensors in host memory.

    Args:
        meta: Metadata of a checkpoint at the step.
        counters: `TrainState.counters`.
        reading: Progress of the numerics guard; None if the guard has read the step.
        saved_step: Step of the newest checkpoint; 0 for none.
        initial_norm: Observer of the norm of newly drawn weights.
        result: Result of the step if its record, evaluation and checkpoint are still to be made; None if they are
            finished.
    """

    meta: Meta
    counters: Mapping[str, Tensor] = field(default_factory=dict)
    reading: Reading | None = None
    saved_step: int = 0
    initial_norm: RunObserver = field(default_factory=RunObserver)
    result: StepResult | None = None

    @property
    def recorded_step(self) -> int:
        """Last step whose record in the metrics files is kept."""
        return self.meta.step if self.result is None else self.meta.step - 1


class DescribesState(Protocol):
    """Interface of an object that provides the tensors and metadata of a checkpoint; see `Checkpoints`."""

    saved_step: int

    def shards(self) -> Shards:
        """Tensors of the current training state."""

    def meta_at(self, step: int, stability: Mapping[str, Any]) -> Meta:
        """Metadata of a step's checkpoint, given the state of the numerics guard."""


@dataclass(frozen=True)
class WatchedRun:
    """Parts of a run on one rank from which the rank's memory takes the state when the run ends."""

    state: TrainState
    guard: NumericsGuard
    checkpoints: DescribesState
    initial_norm: RunObserver


class RankMemory(RunObserver):
    """Training state of this rank after its last update, kept in memory when a peer is lost.

    Attributes:
        is_kept: The run recovers in the job (`recovery.in_job`). Otherwise the memory stays empty.
        shards: Tensors of the state after the run has ended on this rank; empty for none.
        resumed: Numbers from which this start continued in memory; None if it started from elsewhere.
    """

    def __init__(self, *, is_kept: bool = False) -> None:
        self.is_kept = is_kept
        self.shards: Shards = {}
        self.resumed: StepNumbers | None = None
        self._run: WatchedRun | None = None
        self._step = 0
        self._is_whole = False
        self._is_finished = False
        self._result: StepResult | None = None
        self._stability: Mapping[str, Any] = {}
        self._reading = Reading(0)
        self._counters: dict[str, Tensor] = {}
        self._numbers: dict[bool, StepNumbers] = {}

    def watch(self, run: WatchedRun, step: int) -> TrainState:
        """Refer to the training state of a run after a step; return a state that reports its updates to the memory."""
        state = run.state
        if not self.is_kept:
            return state
        self._run = run
        self.shards = {}
        self._numbers = {}
        self._note(step, None if self.resumed is None else self.resumed.result)
        reported = state.section

        def section(name: Section) -> None:
            if name == "optimizer":
                if state.backend.is_asynchronous:
                    state.backend.fetch({"num_updates": state.optimizer.num_updates})
                self._is_whole = False
            reported(name)

        return state.reporting(section)

    def updated(self, step: int, result: StepResult) -> None:
        """Note that a step's update is done, but its record, evaluation and checkpoint are not."""
        if self._run is not None:
            self._note(step, result)

    def finish(self, step: int) -> None:
        self._is_finished = True

    def detach(self) -> None:
        """Keep only tensors and numbers after the end of the run, since its other parts hold process groups."""
        run, self._run = self._run, None
        if run is None or not self._is_whole:
            return
        shards = dict(run.checkpoints.shards())
        if run.state.backend.is_asynchronous:  # the device may lack room for this state and the next start's
            for kind, tensors in shards.items():
                shards[kind] = {name: tensor.cpu() for name, tensor in tensors.items()}
        self.shards = shards
        counters = {name: counter.cpu() for name, counter in self._counters.items()}
        before = run.checkpoints.meta_at(self._step, self._stability), counters, self._reading
        after = run.checkpoints.meta_at(self._step, run.guard.kept()), counters, run.guard.reading
        saved_step, initial_norm = run.checkpoints.saved_step, run.initial_norm
        self._numbers = {
            False: StepNumbers(*before, saved_step, initial_norm, self._result),
            True: StepNumbers(*after, saved_step, initial_norm),
        }

    @property
    def standing(self) -> HeldStep | None:
        """Step whose state the memory holds; None if the state is absent, or in the middle of an update."""
        return HeldStep(self._step, self._is_finished) if self._is_whole else None

    def agree(self, ranks: Ranks) -> AgreedStep | None:
        """Agree with all ranks on the step from which this start continues; None if no whole state is in memory."""
        self.resumed = None
        if not self.is_kept:
            return None
        mesh = ranks.mesh
        return agree(ranks.gather(self.standing), [*mesh.dense.replica.groups, *mesh.experts.replica.groups])

    def numbers(self, *, is_finished: bool) -> StepNumbers:
        """Metadata and counters of the step in memory.

        Args:
            is_finished: All ranks agreed that the step is concluded.
        """
        return self._numbers[is_finished]

    def _note(self, step: int, result: StepResult | None) -> None:
        assert self._run is not None
        guard = self._run.guard
        self._step = step
        self._is_whole = True
        self._is_finished = result is None
        self._result = result
        self._stability = guard.kept()
        self._reading = guard.reading
        # Copies, since a device may already change the counters for the next step before the update waits.
        self._counters = {name: counter.detach().clone() for name, counter in self._run.state.counters.items()}
