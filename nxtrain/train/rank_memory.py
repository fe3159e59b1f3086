"""Memory of a rank: the training state after its last update, from which a run goes on when a peer is lost.

The update follows the sums over all ranks. So ranks differ by one update at most when one of them is lost. The run goes
on from the newest step whose whole state the survivors hold together. A rank without that step receives its tensors
from a replica: the replacement, and a survivor that is one update behind or was in the midst of one.

Nothing is copied during training: the memory refers to the state itself, which a step changes in its update alone. On
a device that the host does not wait for, the update is queued once the sums have arrived: those of a group that has
lost a rank are wrong. There, the state goes to the host's memory when the run has ended. The
record, evaluation and checkpoint of the step are made again where a survivor had not concluded them.
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
class Standing:
    """Step that a rank holds in memory, and True if its record, evaluation and checkpoint are made."""

    step: int
    is_concluded: bool


@dataclass(frozen=True)
class AgreedStep:
    """Agreement of all ranks on the state from which the run goes on.

    Args:
        step: Finished updates.
        holders: Ranks that hold the state of the step.
        is_concluded: The record, evaluation and checkpoint of the step are made.
    """

    step: int
    holders: frozenset[int]
    is_concluded: bool

    def __str__(self) -> str:
        """Message about the step from which the run continues."""
        holders = spans(sorted(self.holders))
        return f"the state of step {self.step} comes from the memory of ranks {holders}, not from a checkpoint"


def agree(standings: Sequence[Standing | None], replicas: Iterable[Sequence[int]]) -> AgreedStep | None:
    """Agree on the newest step that a rank of each group of replicas holds; None: there is none.

    The leader writes the files of a run. If it lost its memory, the step counts as not concluded.

    Args:
        standings: Standing of each rank; None: its memory holds no whole state.
        replicas: Groups of ranks that hold the same tensors.
    """
    groups = [*replicas]
    known = [(rank, standing) for rank, standing in enumerate(standings) if standing is not None]
    for step in sorted({standing.step for _, standing in known}, reverse=True):
        holders = frozenset(rank for rank, standing in known if standing.step == step)
        if all(holders.intersection(group) for group in groups):
            concluded = all(standing.is_concluded for _, standing in known if standing.step == step)
            return AgreedStep(step, holders, concluded and 0 in holders)
    return None


@dataclass(frozen=True)
class StepNumbers:
    """Numbers after an update, equal on all ranks, with their tensors in host memory.

    Args:
        meta: Metadata of a checkpoint at the step.
        counters: `TrainState.counters`.
        reading: Progress of the guard; None: the guard has read the step.
        saved_step: Step of the newest checkpoint; 0: none.
        initial_norm: Observer of the norm of drawn weights.
        result: Result of the step whose record, evaluation and checkpoint are still to be made; None: they are made.
    """

    meta: Meta
    counters: Mapping[str, Tensor] = field(default_factory=dict)
    reading: Reading | None = None
    saved_step: int = 0
    initial_norm: RunObserver = field(default_factory=RunObserver)
    result: StepResult | None = None

    @property
    def recorded_step(self) -> int:
        """Last step whose record stays."""
        return self.meta.step if self.result is None else self.meta.step - 1


class DescribesState(Protocol):
    """Interface of an object that gives tensors and metadata of a checkpoint; see `Checkpoints`."""

    saved_step: int

    def shards(self) -> Shards:
        """Tensors of the present state."""

    def meta_at(self, step: int, stability: Mapping[str, Any]) -> Meta:
        """Metadata of a step, given the state of the guard."""


@dataclass(frozen=True)
class WatchedRun:
    """Parts of a run on one rank, from which the memory takes the state when the run ends."""

    state: TrainState
    guard: NumericsGuard
    checkpoints: DescribesState
    initial_norm: RunObserver


class RankMemory(RunObserver):
    """Training state of this rank after its last update; survives the loss of a peer.

    Attributes:
        is_kept: The run recovers in the job. Otherwise, the memory stays empty.
        shards: Tensors of the state, once the run has ended here; empty: none.
        resumed: Numbers with which this start went on from memory; None: it went on from elsewhere.
    """

    def __init__(self, *, is_kept: bool = False) -> None:
        self.is_kept = is_kept
        self.shards: Shards = {}
        self.resumed: StepNumbers | None = None
        self._run: WatchedRun | None = None
        self._step = 0
        self._is_whole = False
        self._is_concluded = False
        self._result: StepResult | None = None
        self._stability: Mapping[str, Any] = {}
        self._reading = Reading(0)
        self._counters: dict[str, Tensor] = {}
        self._numbers: dict[bool, StepNumbers] = {}

    def watch(self, run: WatchedRun, step: int) -> TrainState:
        """Refer to the state of a run after a step; return the state, whose updates the memory notices."""
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
        """Note that the update of a step is done, and its record, evaluation and checkpoint are not."""
        if self._run is not None:
            self._note(step, result)

    def finish(self, step: int) -> None:
        self._is_concluded = True

    def detach(self) -> None:
        """Keep the tensors and numbers alone after the end of the run, whose other parts hold its process groups."""
        run, self._run = self._run, None
        if run is None or not self._is_whole:
            return
        shards = dict(run.checkpoints.shards())
        if run.state.backend.is_asynchronous:  # the device may have no room for this state and that of the next start
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
    def standing(self) -> Standing | None:
        """Step of the state; None: the state is absent, or between two steps."""
        return Standing(self._step, self._is_concluded) if self._is_whole else None

    def agree(self, ranks: Ranks) -> AgreedStep | None:
        """Agree with all ranks on the state from which this start goes on; None: no state is whole in memory."""
        self.resumed = None
        if not self.is_kept:
            return None
        mesh = ranks.mesh
        return agree(ranks.gather(self.standing), [*mesh.dense.replica.groups, *mesh.experts.replica.groups])

    def numbers(self, *, is_concluded: bool) -> StepNumbers:
        """Numbers of the step, as all ranks agreed to go on."""
        return self._numbers[is_concluded]

    def _note(self, step: int, result: StepResult | None) -> None:
        assert self._run is not None
        guard = self._run.guard
        self._step = step
        self._is_whole = True
        self._is_concluded = result is None
        self._result = result
        self._stability = guard.kept()
        self._reading = guard.reading
        # Copies: a device may add the wrong numbers of the next step to the state's own before its update waits.
        self._counters = {name: counter.detach().clone() for name, counter in self._run.state.counters.items()}
