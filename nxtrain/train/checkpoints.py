"""Checkpoints of a run: from the train state to the run's folder and its mirror."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nxtrain.checkpoint.async_writer import AsyncCheckpointWriter, Outcome
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror import TIMEOUT_S, Mirrored
from nxtrain.checkpoint.mirror_uploads import MirrorUploader, UploadDeadline
from nxtrain.checkpoint.save import Retention
from nxtrain.checkpoint.shards import Shards
from nxtrain.config.check import Resolved
from nxtrain.errors import CheckpointError
from nxtrain.metrics.run_observer import RunObserver, Work
from nxtrain.run_folder import CHECKPOINTS_DIR
from nxtrain.train.compatibility import RunInputs, meta_at
from nxtrain.train.start import shards_of
from nxtrain.train.step import TrainState


class Checkpoints(RunObserver):
    """Checkpoints of a run at its save steps. Every rank creates one and calls it at the same steps.

    Args:
        plan: The checked configuration.
        state: Train state to save.
        inputs: Identity of the run's data and tokenizer.
        begun: Metadata of the step from which this process started.
        tokenizer: A `tokenizer.json` to keep with each checkpoint.
        stability: Returns the state of the norms and skipped steps that a resumed run needs.
        print_line: Prints a line for the user.
        mirrored: The mirror of the checkpoints; None: there is no mirror.
        saved: Called after each commit with the seconds of stall and of writing.
    """

    def __init__(
        self,
        plan: Resolved,
        state: TrainState,
        inputs: RunInputs,
        begun: Meta,
        tokenizer: Path | None,
        stability: Callable[[], dict[str, Any]],
        print_line: Callable[[str], None],
        mirrored: Mirrored | None = None,
        saved: Callable[[float, float], None] = lambda stall_s, write_s: None,
    ) -> None:
        config, backend = plan.config, state.backend
        self._plan, self._state, self._inputs, self._begun, self._print_line = plan, state, inputs, begun, print_line
        self._stability, self._saved = stability, saved
        self._failed = ""
        retention, mesh = Retention(config.checkpoint.keep, config.checkpoint.keep_every), state.mesh
        uploader = (
            MirrorUploader(mirrored, retention, mesh, backend.background_group(TIMEOUT_S), backend.host_group)
            if mirrored
            else None
        )
        self._saver = AsyncCheckpointWriter(
            config.run.dir / CHECKPOINTS_DIR,
            state.layout,
            retention=retention,
            tokenizer=tokenizer,
            group=backend.background_group(config.recovery.hang_timeout_s),
            talk=backend.host_group,
            background=config.checkpoint.async_,
            told=self._on_saved,
            copies=uploader,
            disk=mirrored.disk if mirrored else None,
            copied=self._on_uploaded,
        )

    def save(self, step: int, last: bool) -> None:
        """Save the state after a step.

        Args:
            step: Finished updates.
            last: This is the last checkpoint of the run: wait until it is written.

        Raises:
            CheckpointError: The last checkpoint was not written; or an earlier one was not, with `checkpoint.strict`.
        """
        meta = meta_at(step, self._plan, self._inputs, self._begun)
        self._saver.save(self._shards, meta.model_copy(update={"stability": self._stability()}), must=last)
        if last and self._failed:
            raise CheckpointError(self._failed)

    def enter(self, step: int, work: Work) -> None:
        """Report finished uploads, and the outcome of the last checkpoint once its write has ended.

        With `checkpoint.strict` a failed write is reported at the next save, where it ends the run on all ranks.
        """
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
        """Wait for the last checkpoint and its upload to the mirror; nothing can be saved afterwards.

        The wait goes on while any rank uploads bytes, with pauses of at most `recovery.grace_s`.

        Args:
            soon: The launcher may be waiting for the exit: uploads get half of `recovery.grace_s` in all.
            alive: Called repeatedly during the wait for uploads.
            asked: True once this rank was asked to stop, so that the launcher may be waiting.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        grace_s = self._plan.config.recovery.grace_s
        soon_s = 0.5 * grace_s
        self._saver.close(
            UploadDeadline(grace_s, soon_s) if soon else UploadDeadline(grace_s, asked_s=soon_s), alive, asked
        )
        if self._failed:
            raise CheckpointError(self._failed)

    def _shards(self) -> Shards:
        shards = shards_of(self._state)
        self._state.backend.step_boundary()  # lazy devices would otherwise compute each cast alone, as it is read
        return shards

    def _on_saved(self, outcome: Outcome) -> None:
        self._failed = outcome.problem
        if not outcome.problem:
            self._saved(outcome.stall_s, outcome.write_s)
        if outcome.problem and self._plan.config.checkpoint.strict:
            raise CheckpointError(f"no checkpoint of step {outcome.step}: {outcome.problem}")
        if outcome.problem:
            self._print_line(f"WARNING: no checkpoint of step {outcome.step}: {outcome.problem}; training goes on")
        for failed in outcome.untidy:
            self._print_line(f"WARNING: {failed}; the checkpoint of step {outcome.step} is there, and training goes on")

    def _on_uploaded(self, step: int, problem: str) -> None:
        if problem:
            line = f"WARNING: the mirror lacks the checkpoint of step {step}: {problem}"
            self._print_line(f"{line}; it is in {self._plan.config.run.dir}, and that is enough to go on")
