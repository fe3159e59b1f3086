"""The checkpoints of a run, from its state to its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nxtrain.checkpoint.async_writer import Outcome, Saver
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror import TIMEOUT_S, Mirrored
from nxtrain.checkpoint.mirror_uploads import Copies, Patience
from nxtrain.checkpoint.save import Retention
from nxtrain.checkpoint.shards import Shards
from nxtrain.config.check import Resolved
from nxtrain.errors import CheckpointError
from nxtrain.run_folder import CHECKPOINTS_DIR
from nxtrain.train.compatibility import Inputs, meta_at
from nxtrain.train.start import shards_of
from nxtrain.train.step import TrainState


class Checkpoints:
    """Saves a run at its steps. Every rank makes one, and calls it at the same steps.

    Args:
        plan: The checked configuration.
        state: What is saved.
        inputs: Identity of what the run reads.
        begun: Where the run stood when this process began.
        tokenizer: A `tokenizer.json` to keep with each checkpoint.
        stability: Tells what of the norms and of skipped steps is to be known after a resumption.
        say: Takes lines for people.
        mirrored: Where copies go, if anywhere.
        saved: Is told what each checkpoint that was committed took.
    """

    def __init__(
        self,
        plan: Resolved,
        state: TrainState,
        inputs: Inputs,
        begun: Meta,
        tokenizer: Path | None,
        stability: Callable[[], dict[str, Any]],
        say: Callable[[str], None],
        mirrored: Mirrored | None = None,
        saved: Callable[[float, float], None] = lambda stall_s, write_s: None,
    ) -> None:
        config, backend = plan.config, state.backend
        self._plan, self._state, self._inputs, self._begun, self._say = plan, state, inputs, begun, say
        self._stability, self._saved = stability, saved
        self._failed = ""
        retention, mesh = Retention(config.checkpoint.keep, config.checkpoint.keep_every), state.mesh
        copies = (
            Copies(mirrored, retention, mesh, backend.background_group(TIMEOUT_S), backend.host_group)
            if mirrored
            else None
        )
        self._saver = Saver(
            config.run.dir / CHECKPOINTS_DIR,
            state.layout,
            retention=retention,
            tokenizer=tokenizer,
            group=backend.background_group(config.recovery.hang_timeout_s),
            talk=backend.host_group,
            background=config.checkpoint.async_,
            told=self._told,
            copies=copies,
            disk=mirrored.disk if mirrored else None,
            copied=self._copied,
        )

    def save(self, step: int, last: bool) -> None:
        """Save the state after a step.

        Args:
            step: Finished updates.
            last: Nothing comes after it: wait until it is written.

        Raises:
            CheckpointError: It was not, though it is the last; or with `checkpoint.strict`, an earlier one was not.
        """
        meta = meta_at(step, self._plan, self._inputs, self._begun)
        self._saver.save(self._shards, meta.model_copy(update={"stability": self._stability()}), must=last)
        if last and self._failed:
            raise CheckpointError(self._failed)

    def report(self) -> None:
        """Tell what became of the last checkpoint, if it is written; a strict run ends at the next, on all ranks."""
        self._saver.report_copies()
        if not self._plan.config.checkpoint.strict:
            self._saver.report()

    def close(
        self,
        *,
        soon: bool = False,
        alive: Callable[[], None] = lambda: None,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for the last checkpoint, and for its copy in the mirror; none can be saved after it.

        A copy is waited for while bytes of it go on to come from the disk of any rank, with pauses of
        `recovery.grace_s` at most.

        Args:
            soon: The launcher may wait for the end: half of `recovery.grace_s` is for copies, and no more.
            alive: Is called all the time while copies are waited for.
            asked: Whether this rank is asked to stop, and so the launcher may wait.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        grace_s = self._plan.config.recovery.grace_s
        soon_s = 0.5 * grace_s
        self._saver.close(Patience(grace_s, soon_s) if soon else Patience(grace_s, asked_s=soon_s), alive, asked)
        if self._failed:
            raise CheckpointError(self._failed)

    def _shards(self) -> Shards:
        shards = shards_of(self._state)
        self._state.backend.step_boundary()  # casts that lazy devices would compute one by one, as each is read
        return shards

    def _told(self, outcome: Outcome) -> None:
        self._failed = outcome.problem
        if not outcome.problem:
            self._saved(outcome.stall_s, outcome.write_s)
        if outcome.problem and self._plan.config.checkpoint.strict:
            raise CheckpointError(f"no checkpoint of step {outcome.step}: {outcome.problem}")
        if outcome.problem:
            self._say(f"WARNING: no checkpoint of step {outcome.step}: {outcome.problem}; training goes on")
        for failed in outcome.untidy:
            self._say(f"WARNING: {failed}; the checkpoint of step {outcome.step} is there, and training goes on")

    def _copied(self, step: int, problem: str) -> None:
        if problem:
            told = f"WARNING: the mirror lacks the checkpoint of step {step}: {problem}"
            self._say(f"{told}; it is in {self._plan.config.run.dir}, and that is enough to go on")
