"""What becomes of a run whose numbers go wrong: steps that are not finite, replicas that differ, norms that grow."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from torch import Tensor

from nxtrain.config.schema import RunConfig
from nxtrain.distributed.agreement import by_leader
from nxtrain.errors import CheckpointError, DivergedError, RestartError
from nxtrain.io.notes import Notes
from nxtrain.metrics.stability import Stability
from nxtrain.process.screen import standard_error
from nxtrain.run_folder import LOGS_DIR
from nxtrain.train.health.replica_check import Vote
from nxtrain.train.health.skipped_steps import BadSteps
from nxtrain.train.step import TrainState

NON_FINITE = "non_finite.jsonl"
VOTES = "votes.jsonl"
UNRECORDED = "skipped_unrecorded"
"""Beside what `Stability` has a checkpoint keep."""
HOPELESS = 50
"""Steps in a row that update nothing, after which no policy goes on."""

REMEDY = "Resume from a checkpoint before it with a lower optim.lr, a longer optim.warmup_steps or a smaller optim.clip"


@dataclass(frozen=True)
class Verdict:
    """What a record says beside its numbers.

    Args:
        skipped_steps: Since the record before, those that updated nothing.
        alarm: In words; empty: none.
    """

    skipped_steps: tuple[int, ...] = ()
    alarm: str = ""


class Guard:
    """Reads what the device remembers, and decides.

    A step that is not finite has updated nothing when it is read. What follows is `recovery.non_finite`: the end of the
    run, nothing, or a start from the newest checkpoint. There, a step that is bad again was so for its data or its
    weights, and is skipped from then on; one that is not was a fault of the machine. The ranks of a run see the same
    numbers and decide alike; the first of them writes down what is not to be forgotten.

    Args:
        config: Of the run.
        state: Its state.
        heeds: Whether numbers have a meaning; where graphs are collected or traced they have none, and nothing is read
            or written.
        console: Where warnings go; by default standard error.
    """

    def __init__(
        self, config: RunConfig, state: TrainState, *, heeds: bool = True, console: Console | None = None
    ) -> None:
        self.stability = Stability()
        self._config, self._state, self._heeds = config, state, heeds
        self._leads = state.mesh.rank == 0
        self._say = (console or standard_error(quiet=not self._leads)).print
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._last_read, self._in_a_row = 0, 0
        self._unrecorded: tuple[int, ...] = ()
        self._vote = Vote(state) if config.recovery.vote_every else None
        self._verdicts: dict[int, str] = {}
        self._bad_steps, self._votes = (Notes(config.run.dir / LOGS_DIR / name) for name in (NON_FINITE, VOTES))
        if heeds and config.recovery.non_finite == "rollback":
            # By one rank: where each node has a disk of its own, the others' do not tell.
            lines = by_leader(
                self._bad_steps.read, state.mesh, state.backend.host_group, f"cannot read {self._bad_steps.file}"
            )
            self._verdicts = {line["step"]: line["verdict"] for line in lines if {"step", "verdict"} <= line.keys()}

    def begin(self, finished: int, stability: Mapping[str, Any]) -> None:
        """Go on after some finished steps, with what a checkpoint has of `kept`."""
        self._last_read = finished
        self._in_a_row = 0
        while self._verdicts.get(finished - self._in_a_row) == "persistent":
            self._in_a_row += 1
        self.stability.restore(stability)
        self._unrecorded = tuple(stability.get(UNRECORDED, ()))

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps, for `begin`: steps that were skipped, too, and stand in no record yet."""
        return self.stability.state() | ({UNRECORDED: [*self._unrecorded]} if self._unrecorded else {})

    def values(self) -> dict[str, Tensor]:
        """What to fetch with a record, as () float32 tensors."""
        return self._state.skipped.values()

    def judge(self, step: int, read: dict[str, float], *, recorded: bool = True) -> Verdict:
        """Look at what was read after a step; takes out of it what is no part of the record.

        Args:
            step: Which.
            read: What was fetched.
            recorded: It becomes a record. What does not is no part of the norm's course, or a run that stopped and went
                on would raise its alarms at other steps than one that did not.

        Raises:
            DivergedError: The run must not go on.
            RestartError: It must go on from its newest checkpoint.
            CheckpointError: The same, and the disk does not take what is to be known then.
        """
        bad = self._state.skipped.take(step, self._last_read, read)
        last_read, self._last_read = self._last_read, step
        if not self._heeds:
            return Verdict()
        if len(self._bad_steps) and not self._bad_steps.write():
            self._warn(f"{self._bad_steps.file} is written again, and lacks nothing")
        last_good = max(set(range(last_read + 1, step + 1)).difference(bad.steps), default=last_read - self._in_a_row)
        self._in_a_row = step - last_good
        self._refuse_weights(step, bad, read)
        self._settle(bad, last_read, step)
        if bad.steps:
            self._decide(bad)
        skipped = self._unrecorded + bad.steps
        self._unrecorded = () if recorded else skipped
        if not recorded:
            return Verdict(skipped)
        kind, alarm = self.stability.see(read["loss"], read["grad_norm"])
        if kind == "diverging" and self._config.recovery.on_divergence == "stop":
            raise DivergedError(f"step {step}: {alarm}; the run is diverging, recovery.on_divergence=stop. {REMEDY}")
        if alarm:
            self._warn(f"step {step}: {kind}: {alarm}")
        return Verdict(skipped, f"{kind}: {alarm}" if alarm else "")

    def votes_at(self, step: int, *, saves: bool) -> bool:
        """Whether the replicas are compared after a step: as configured, and before each checkpoint."""
        every = self._config.recovery.vote_every
        return self._vote is not None and self._vote.is_possible and (saves or step % every == 0)

    def vote(self, step: int) -> None:
        """Compare the replicas.

        Raises:
            RestartError: They differ.
        """
        assert self._vote is not None
        of_all, differing = self._vote.gather()
        backend = self._state.backend
        number = backend.fetch({"differing": differing})["differing"]
        if not self._heeds or number == 0:
            return
        before = self._named_before()
        backend.collectives.barrier()  # nobody takes what is found now for something earlier
        told = self._name(step, of_all, before)
        backend.collectives.barrier()  # what was found is on disk before the first rank ends
        raise RestartError(
            f"step {step}: the replicas of the model are no longer equal: {told}. A run whose ranks are started again "
            "(recovery.max_restarts) goes on from its newest checkpoint, before which they were; a rank that is named "
            f"again and again has a bad device{self._about_streams()}"
        )

    def _about_streams(self) -> str:
        """Way out where replicas rely on equal random bits of their hardware, and may differ for want of them."""
        if not (self._state.backend.kernels.rounds and self._state.mesh.replica.size > 1):
            return ""
        return (
            ". Under precision.update=bf16_stochastic with parallel.shard=none the replicas rely on equal random bits "
            "of their hardware: if every vote finds all of them different, use parallel.shard=zero1"
        )

    def _named_before(self) -> Counter[int]:
        """How often each rank was named."""
        found: Counter[int] = Counter()
        with suppress(OSError):  # that ranks differ is to be told whatever the disk does
            found.update(rank for line in self._votes.read() for rank in line.get("ranks", ()))
        return found

    def _name(self, step: int, of_all: Sequence[Tensor], before: Counter[int]) -> str:
        """Who differs in what; the first rank of those that compared writes it down."""
        assert self._vote is not None
        dissents = self._vote.dissents(of_all)
        if not dissents:
            return f"others found it, see {self._votes.file}"
        for found in dissents:
            if found.first == self._state.mesh.rank:
                line = {"step": step, "ranks": found.ranks, "tensors": found.tensors, "attempt": self._attempt}
                self._keep(self._votes, line)
        named = {rank: before[rank] for found in dissents for rank in found.ranks}
        again = [f"rank {rank} was named {_often(times)} before" for rank, times in named.items() if times]
        return "; ".join([*map(str, dissents), *again])

    def _refuse_weights(self, step: int, bad: BadSteps, read: Mapping[str, float]) -> None:
        """End a run whose weights are not finite: of them nothing is saved, and no step that is skipped mends them.

        With `recovery.non_finite=rollback`, steps that were not rolled back before are, which mends the weights too.

        Raises:
            DivergedError: They are not, or something else is not that bad steps do not explain.
        """
        of_steps = {"loss", "grad_norm"} if bad.steps else set[str]()
        wrong = [f"{key}={x}" for key, x in read.items() if key not in of_steps and not math.isfinite(x)]
        if not wrong:
            return
        known = {"rolled_back", "persistent"}
        if self._config.recovery.non_finite == "rollback" and any(
            self._verdicts.get(each) not in known for each in bad.steps
        ):
            return
        for each in bad.steps:
            self._note(each, bad, "stopped")
        since = f"; {self._told(bad)}" if bad.steps else ""
        raise DivergedError(
            f"step {step}: {', '.join(wrong)}{since}; the weights are not finite, and the run has diverged. Nothing is "
            f"saved of them. {REMEDY}"
        )

    def _settle(self, bad: BadSteps, last_read: int, step: int) -> None:
        """Say what became of steps that were rolled back."""
        rolled_back = [s for s, verdict in self._verdicts.items() if verdict == "rolled_back"]
        for earlier in rolled_back:
            if last_read < earlier <= step:
                if earlier in bad.steps:
                    self._note(earlier, bad, "persistent")
                    self._warn(
                        f"step {earlier} is not finite again on the same data and weights: no fault of the machine. "
                        "It is skipped from now on"
                    )
                else:
                    self._note(earlier, BadSteps(), "transient")
                    self._warn(f"step {earlier} is finite this time: what it was before was a fault of the machine")

    def _decide(self, bad: BadSteps) -> None:
        """Do what is configured about steps that updated nothing."""
        policy = self._config.recovery.non_finite
        new = [step for step in bad.steps if self._verdicts.get(step) != "persistent"]
        if policy == "stop":
            for step in bad.steps:
                self._note(step, bad, "stopped")
            raise DivergedError(f"{self._told(bad)}; the run has diverged (recovery.non_finite=stop). {REMEDY}")
        if self._in_a_row >= HOPELESS:
            raise DivergedError(f"{self._told(bad)}, the {self._in_a_row}th in a row; the run has diverged. {REMEDY}")
        if policy == "rollback" and new:
            for step in new:
                self._note(step, bad, "rolled_back")
            self._make_sure(bad)
            raise RestartError(
                f"{self._told(bad)}; recovery.non_finite=rollback: a run whose ranks are started again "
                "(recovery.max_restarts) goes on from its newest checkpoint and finds out whether that recurs"
            )
        if policy == "skip":
            for step in new:
                self._note(step, bad, "skipped")
        self._warn(f"{self._told(bad)}; recovery.non_finite={policy}: the run goes on")

    def _make_sure(self, bad: BadSteps) -> None:
        """Have what was found on the disk before the first rank ends: who comes after decides by it.

        Raises:
            CheckpointError: It cannot be written, so that a start from the checkpoint would come here again and again.
        """
        file, state = self._bad_steps.file, self._state
        problem = by_leader(self._bad_steps.write, state.mesh, state.backend.host_group, f"cannot write {file}")
        if problem:
            raise CheckpointError(
                f"{self._told(bad)}; recovery.non_finite=rollback is not possible, since {file} cannot be written: "
                f"{problem}. Make room for it and start the run again, which goes on from its newest checkpoint"
            )

    def _told(self, bad: BadSteps) -> str:
        steps = ", ".join(map(str, bad.steps))
        which, it = (f"step {steps}: ", "it") if len(bad.steps) == 1 else (f"steps {steps}: the last with ", "them")
        return f"{which}loss={bad.loss}, grad_norm={bad.grad_norm}, and nothing was updated by {it}"

    def _note(self, step: int, bad: BadSteps, verdict: str) -> None:
        """Write down a step and its data, of which the positions in the order suffice to find it again."""
        self._verdicts[step] = verdict
        if not self._leads:
            return
        rows = self._config.train.global_batch
        numbers = (bad.loss, bad.grad_norm) if bad.steps and step == bad.steps[-1] else (None, None)
        loss, grad_norm = (x if x is None or math.isfinite(x) else str(x) for x in numbers)
        positions = [(step - 1) * rows, step * rows]
        line = {"step": step, "loss": loss, "grad_norm": grad_norm, "positions": positions, "attempt": self._attempt}
        self._keep(self._bad_steps, {**line, "verdict": verdict})

    def _keep(self, notes: Notes, line: Mapping[str, Any]) -> None:
        """Write down a line; if the disk is full, once there is room."""
        if problem := notes.add(line):
            self._warn(f"{notes.file} cannot be written: {problem}; until it is, it lacks {json.dumps(line)}")

    def _warn(self, text: str) -> None:
        self._say(f"warning: {text}", style="yellow", markup=False)


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"
