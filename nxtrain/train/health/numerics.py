"""Numerics guard: policies for steps that are not finite, replicas that differ, and losses or norms that grow."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from torch import Tensor

from nxtrain.checkpoint import directory
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import CheckpointError, DivergedError, RestartError
from nxtrain.common.io.jsonl import JsonlLog
from nxtrain.common.process.console import standard_error
from nxtrain.common.run_folder import CHECKPOINTS_DIR, LOGS_DIR
from nxtrain.config.schema import RunConfig
from nxtrain.data.loader import RowPositions
from nxtrain.metrics.meters import Verdict
from nxtrain.metrics.routers import Loads, RouterWatch
from nxtrain.metrics.spikes import NormSpikes
from nxtrain.metrics.stability import Stability
from nxtrain.train.health.replica_check import ReplicaCheck
from nxtrain.train.health.rollbacks import Rollbacks
from nxtrain.train.health.step_history import BadSteps
from nxtrain.train.step import TrainState

NON_FINITE = "non_finite.jsonl"
VOTES = "votes.jsonl"
UNRECORDED = "skipped_unrecorded"
"""Key in a checkpoint's stability state for skipped steps that are in no record yet."""
SPIKES = "spikes"
"""Key in a checkpoint's stability state for spikes of the gradient norm."""
ALARMS = "alarms"
"""Key in a checkpoint's stability state for alarms that are in no record yet."""
ROUTERS = "routers"
"""Key in a checkpoint's stability state for findings about routers."""
MOST_ALARMS = 3
"""Largest number of alarm texts in a record: the first alarms since the record before."""
OF_WEIGHTS = {"param_norm", "lost_update_frac"}
"""Keys of a record with numbers of the weights, which are finite after a step that updates nothing."""
MAX_BAD_STEPS = 50
"""Number of consecutive steps without an update after which the run ends under every policy."""

_SOFTER = "with a lower optim.lr, a longer optim.warmup_steps or a smaller optim.clip"


@dataclass(frozen=True)
class Reading:
    """Progress of the numerics guard through the steps.

    Args:
        last: Last step whose numbers the guard has read.
        in_a_row: Number of consecutive steps, up to the last step, that updated nothing.
    """

    last: int
    in_a_row: int = 0


class NumericsGuard:
    """Guard that reads the losses and norms of all steps from the device and applies the configured policies.

    A step that is not finite has updated nothing when the host reads its numbers. `recovery.non_finite` chooses between
    ending the run, continuing, and a restart from the newest checkpoint. After such a restart, a step that fails again
    is persistent: its data or weights are the cause, and it is skipped from then on. A step that is finite the second
    time was a fault of the machine. All ranks see the same numbers and decide alike; rank 0 writes the verdicts to
    disk.

    Args:
        config: Configuration of the run.
        state: Training state of the run.
        acts: False while graphs are extracted or traced, when numbers have no meaning. The guard then neither acts on
            the numbers nor reads or writes its files.
        attempt: Number of restarts before this start, for the files.
        console: Console of the warnings; None for standard error.
        rollbacks: Rollbacks of the run, for `recovery.on_divergence=rollback`.
        rows: Positions of each step's rows in the order of the data, for the files; None for those of a new run.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        *,
        acts: bool = True,
        attempt: int = 0,
        console: Console | None = None,
        rollbacks: Rollbacks | None = None,
        rows: RowPositions | None = None,
    ) -> None:
        self.stability, self.spikes = Stability(), NormSpikes(config.metrics.spike_threshold)
        self.routers = RouterWatch()
        self._alarms: list[tuple[int, str, str]] = []
        self._config, self._state = config, state
        self._acts = acts
        self._ranks = Ranks(state.mesh, state.backend.host_group)
        self._leads = self._ranks.is_leader
        self._print = (console or standard_error(quiet=not self._leads)).print
        self._attempt, self._rollbacks = attempt, rollbacks
        self._rows = rows or RowPositions(config.train.batch_sizes())
        self._last_read, self._in_a_row = 0, 0
        self._unrecorded: tuple[int, ...] = ()
        self._vote = ReplicaCheck(state) if config.recovery.vote_every else None
        self._verdicts: dict[int, str] = {}
        self._bad_steps = JsonlLog(config.run.dir / LOGS_DIR / NON_FINITE)
        self._votes = JsonlLog(config.run.dir / LOGS_DIR / VOTES)
        if acts and config.recovery.non_finite == "rollback":
            # Read by one rank: where each node has its own disk, only the leader's disk holds the file.
            lines = self._ranks.on_leader(self._bad_steps.read, f"cannot read {self._bad_steps.file}")
            self._verdicts = {line["step"]: line["verdict"] for line in lines if {"step", "verdict"} <= line.keys()}

    @property
    def reading(self) -> Reading:
        """Progress of the guard; the device's history has the numbers of later steps."""
        return Reading(self._last_read, self._in_a_row)

    def begin(self, finished: int, stability: Mapping[str, Any], reading: Reading | None = None) -> None:
        """Resume after the finished steps, with the state that `kept` stored in the checkpoint.

        Args:
            finished: Number of finished updates.
            stability: State from `kept`.
            reading: Progress of the guard; None if all finished steps were read.
        """
        self._last_read = finished
        self._in_a_row = 0
        while self._verdicts.get(finished - self._in_a_row) == "persistent":
            self._in_a_row += 1
        if reading is not None:
            self._last_read, self._in_a_row = reading.last, reading.in_a_row
        self.stability.restore(stability)
        self.spikes.restore(stability.get(SPIKES, {}))
        self.routers.restore(stability.get(ROUTERS, {}))
        self._alarms = [(at, kind, alarm) for at, kind, alarm in stability.get(ALARMS, ())]
        self._unrecorded = tuple(stability.get(UNRECORDED, ()))

    def kept(self) -> dict[str, Any]:
        """State of the guard for a checkpoint, read by `begin`; includes skipped steps and alarms without a record."""
        state = self.stability.state() | {SPIKES: self.spikes.state()}
        routers = self.routers.state()
        if routers["since"]:
            state[ROUTERS] = routers
        if self._unrecorded:
            state[UNRECORDED] = list(self._unrecorded)
        if self._alarms:
            state[ALARMS] = [list(alarm) for alarm in self._alarms]
        return state

    def values(self) -> dict[str, Tensor]:
        """Tensors that the guard needs, fetched together with a record's numbers, by name."""
        values = self._state.history.values()
        if self._state.loss_scale is None:
            return values
        return values | self._state.loss_scale.values()

    def judge(self, step: int, read: dict[str, float], loads: Loads = (), *, recorded: bool = True) -> Verdict:
        """Judge the numbers and expert loads fetched after a step, and remove the guard's own values from the numbers.

        Findings of a step without a record, before a stop, are kept for the next record.
        """
        past = self._state.history.take(step, self._last_read, read)
        scale = read.pop("loss_scale", None)
        overflows: list[int] = []
        if scale is not None:
            overflows = [numbers.step for numbers in past if numbers.overflows(scale)]
        bad = BadSteps.among([numbers for numbers in past if numbers.step not in overflows])
        empty = tuple(numbers.step for numbers in past if not numbers.has_targets)
        last_read, self._last_read = self._last_read, step
        if not self._acts:
            return Verdict()
        if len(self._bad_steps) and not self._bad_steps.write():
            self._warn(f"{self._bad_steps.file} is written again, and lacks nothing")
        last_good = max(set(range(last_read + 1, step + 1)).difference(bad.steps), default=last_read - self._in_a_row)
        self._in_a_row = step - last_good
        self._refuse_weights(step, bad, read, is_skipped=step in (*overflows, *empty))
        self._judge_rolled_back(bad, last_read, step)
        if bad.steps:
            self._decide(bad)
        if empty:
            steps = f"step{'s' * (len(empty) > 1)} {', '.join(map(str, empty))}"
            self._warn(f"{steps}: no token of the global batch is a target, and nothing was updated; the run goes on")
        skipped = self._unrecorded + tuple(sorted((*bad.steps, *overflows, *empty)))
        for numbers in past:
            if not numbers.has_targets:
                continue
            self.spikes.see(numbers.step, numbers.grad_norm)
            kind, alarm = self.stability.see(numbers.loss, numbers.grad_norm)
            if kind:
                self._alarms.append((numbers.step, kind, alarm))
        router = self.routers.see(step, loads)
        if router:
            self._alarms.insert(0, (step, "router", router))  # first, since it lasts, unlike a spike
        if not recorded:
            self._unrecorded = skipped
            return Verdict(skipped)
        self._unrecorded = ()
        alarms, spikes = self._raise_alarms(step), self.spikes
        return Verdict(skipped, alarms, spikes.take(), spikes.mean, spikes.lowest, scale)

    def votes_at(self, step: int, *, saves: bool) -> bool:
        """True if replicas are compared after a step: at the configured interval, and before each checkpoint."""
        every = self._config.recovery.vote_every
        return self._vote is not None and self._vote.is_possible and (saves or step % every == 0)

    def vote(self, step: int) -> None:
        """Compare the replicas of the training state; raise `RestartError` if they differ."""
        assert self._vote is not None
        of_all, differing = self._vote.gather()
        backend = self._state.backend
        number = backend.fetch({"differing": differing})["differing"]
        if not self._acts or number == 0:
            return
        before: Counter[int] = Counter()  # number of earlier votes that named each rank
        with suppress(OSError):  # the difference must be reported even if the disk fails
            for line in self._votes.read():
                before.update(line.get("ranks", ()))
        backend.collectives.barrier()  # no rank may count the findings of this vote among the earlier ones
        findings = self._describe_mismatches(step, of_all, before)
        backend.collectives.barrier()  # the findings are on disk before the first rank exits
        streams = ""
        if backend.kernels.rounds and self._state.mesh.replica.size > 1:
            streams = (
                ". Under precision.update=bf16_stochastic with parallel.shard=none the replicas rely on equal random "
                "bits of their hardware: if every vote finds all of them different, use parallel.shard=zero1"
            )
        raise RestartError(
            f"step {step}: the replicas of the model are no longer equal: {findings}. With recovery.max_restarts, the "
            "run restarts from its newest checkpoint, at which the replicas were equal. A rank that several votes "
            f"name has a faulty device{streams}"
        )

    def _describe_mismatches(self, step: int, of_all: Sequence[Tensor], before: Counter[int]) -> str:
        """Describe the differing ranks and tensors; the lowest rank of each comparison writes them to disk."""
        assert self._vote is not None
        mismatches = self._vote.mismatches(of_all)
        if not mismatches:
            return f"others found it, see {self._votes.file}"
        named: dict[int, int] = {}
        for mismatch in mismatches:
            if mismatch.first == self._state.mesh.rank:
                line = {"step": step, "ranks": mismatch.ranks, "tensors": mismatch.tensors, "attempt": self._attempt}
                self._append(self._votes, line)
            named.update({rank: before[rank] for rank in mismatch.ranks})
        again: list[str] = []
        for rank, times in named.items():
            often = "once" if times == 1 else f"{times} times"
            if times:
                again.append(f"rank {rank} was named {often} before")
        return "; ".join([*map(str, mismatches), *again])

    def _raise_alarms(self, step: int) -> str:
        """Print the alarms since the previous record, and return their texts for the record of a step."""
        alarms, self._alarms = self._alarms, []
        texts: list[str] = []
        for at, kind, alarm in alarms:
            if kind == "diverging" and self._rollbacks and self._config.recovery.on_divergence == "rollback":
                self._rollbacks.roll_back(at, step, alarm)
            if kind == "diverging" and self._config.recovery.on_divergence == "stop":
                policy = "the run is diverging, recovery.on_divergence=stop"
                raise DivergedError(f"step {at}: {alarm}; {policy}. {self._remedy(at)}")
            self._warn(f"step {at}: {kind}: {alarm}")
            texts.append(f"{kind}: {alarm}" if at == step else f"{kind} at step {at}: {alarm}")
        if len(texts) > MOST_ALARMS:
            texts[MOST_ALARMS:] = [f"{len(texts) - MOST_ALARMS} more"]
        return "; ".join(texts)

    def _refuse_weights(self, step: int, bad: BadSteps, read: Mapping[str, float], *, is_skipped: bool) -> None:
        """End a run whose weights are not finite: they are not saved, and skipping steps cannot repair them.

        With `recovery.non_finite=rollback`, newly found bad steps are rolled back instead. The rollback restores finite
        weights too.
        """
        judged: Collection[str] = read.keys()
        if bad.steps or is_skipped:
            judged = OF_WEIGHTS
        wrong = [f"{key}={x}" for key, x in read.items() if key in judged and not math.isfinite(x)]
        if not wrong:
            return
        new = [number for number in bad.steps if self._verdicts.get(number) not in {"rolled_back", "persistent"}]
        if self._config.recovery.non_finite == "rollback" and new:
            return
        since = f"; {self._describe(bad)}" if bad.steps else ""
        for number in bad.steps:
            self._record(number, bad, "stopped")
        raise DivergedError(
            f"step {step}: {', '.join(wrong)}{since}; the run has diverged, and its weights are "
            f"not finite and not saved. {self._remedy(min((*bad.steps, step)))}"
        )

    def _judge_rolled_back(self, bad: BadSteps, last_read: int, step: int) -> None:
        """Record whether each rolled back step since the last reading failed again."""
        rolled_back = [s for s, verdict in self._verdicts.items() if verdict == "rolled_back"]
        for earlier in rolled_back:
            if last_read < earlier <= step:
                if earlier in bad.steps:
                    self._record(earlier, bad, "persistent")
                    self._warn(
                        f"step {earlier} is not finite again on the same data and weights: no fault of the machine. "
                        "It is skipped from now on"
                    )
                else:
                    self._record(earlier, BadSteps(), "transient")
                    self._warn(f"step {earlier} is finite this time: what it was before was a fault of the machine")

    def _decide(self, bad: BadSteps) -> None:
        """Apply the policy `recovery.non_finite` to steps that updated nothing."""
        policy = self._config.recovery.non_finite
        new = [step for step in bad.steps if self._verdicts.get(step) != "persistent"]
        if policy == "stop":
            for step in bad.steps:
                self._record(step, bad, "stopped")
            remedy = self._remedy(bad.steps[0])
            raise DivergedError(f"{self._describe(bad)}; the run has diverged (recovery.non_finite=stop). {remedy}")
        if self._in_a_row >= MAX_BAD_STEPS:
            row, remedy = f"the {self._in_a_row}th in a row", self._remedy(bad.steps[0])
            raise DivergedError(f"{self._describe(bad)}, {row}; the run has diverged. {remedy}")
        if policy == "rollback" and new:
            for step in new:
                self._record(step, bad, "rolled_back")
            self._persist_verdicts(bad)
            raise RestartError(
                f"{self._describe(bad)}; recovery.non_finite=rollback: with recovery.max_restarts, the run restarts "
                "from its newest checkpoint, and checks whether the same step fails again"
            )
        if policy == "skip":
            for step in new:
                self._record(step, bad, "skipped")
        self._warn(f"{self._describe(bad)}; recovery.non_finite={policy}: the run goes on")

    def _persist_verdicts(self, bad: BadSteps) -> None:
        """Write the verdicts on bad steps to disk before the first rank exits, since the restarted run reads them."""
        file = self._bad_steps.file
        problem = self._ranks.on_leader(self._bad_steps.write, f"cannot write {file}")
        if problem:
            raise CheckpointError(
                f"{self._describe(bad)}; recovery.non_finite=rollback is not possible, since {file} cannot be written: "
                f"{problem}. Make room for it and start the run again; it resumes from its newest checkpoint"
            )

    def _remedy(self, step: int) -> str:
        """Advice after a failed step: resume from a checkpoint before the step, if one may exist."""
        folder = self._config.run.dir / CHECKPOINTS_DIR
        saved = any(directory.step_of(path) < step for path in directory.list_checkpoints(folder))
        if saved or self._config.checkpoint.mirror:
            return f"Resume from a checkpoint before it {_SOFTER}"
        return f"No checkpoint is from before it: start again {_SOFTER}"

    def _describe(self, bad: BadSteps) -> str:
        values = f"loss={bad.loss}, grad_norm={bad.grad_norm}, and nothing was updated by"
        if len(bad.steps) == 1:
            return f"step {bad.steps[0]}: {values} it"
        return f"steps {', '.join(map(str, bad.steps))}: the last with {values} them"

    def _record(self, step: int, bad: BadSteps, verdict: str) -> None:
        """Record the verdict on a step, with the positions of its batch in the data order."""
        self._verdicts[step] = verdict
        if not self._leads:
            return
        first_row = self._rows.first(step - 1)
        line: dict[str, Any] = {"step": step, "loss": None, "grad_norm": None}
        if bad.steps and step == bad.steps[-1]:
            line |= {"loss": _json_number(bad.loss), "grad_norm": _json_number(bad.grad_norm)}
        line |= {
            "positions": [first_row, first_row + self._rows.sizes.at(step - 1)],
            "attempt": self._attempt,
            "verdict": verdict,
        }
        self._append(self._bad_steps, line)

    def _append(self, notes: JsonlLog, line: Mapping[str, Any]) -> None:
        """Append a line to a log; if the disk is full, the log writes the line once the disk has room."""
        problem = notes.add(line)
        if problem:
            self._warn(f"{notes.file} cannot be written: {problem}; until it is, it lacks {json.dumps(line)}")

    def _warn(self, text: str) -> None:
        self._print(f"warning: {text}", style="yellow", markup=False)


def _json_number(value: float) -> float | str:
    """Value for JSON, with text in place of infinity and NaN."""
    return value if math.isfinite(value) else str(value)
