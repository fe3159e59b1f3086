"""Checkpoints of a run, from the training state to the run's folder and its mirror."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nxtrain.checkpoint.async_writer import CheckpointWriter, Destination, SaveOutcome
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror import TIMEOUT_S, Mirrored
from nxtrain.checkpoint.mirror_uploads import MirrorUploader, UploadDeadline
from nxtrain.checkpoint.shards import Shards
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import CheckpointError
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.config.check import Resolved
from nxtrain.data.loader import Skips, rows_left_out
from nxtrain.data.stream_loader import LanePosition, merged
from nxtrain.metrics.goodput_meter import GoodputMeter
from nxtrain.metrics.run_observer import RunObserver, Work
from nxtrain.train.compatibility import RunInputs, meta_at
from nxtrain.train.start import shards_of
from nxtrain.train.step import TrainState


@dataclass(frozen=True)
class RunIdentity:
    """Contents of a run's checkpoints besides the tensors.

    Args:
        inputs: Identity of the run's data and tokenizer.
        begun: Metadata of the step from which this process started.
        saved_step: Step of the newest checkpoint at that time; 0 for none.
        tokenizer: A `tokenizer.json` to keep with each checkpoint.
        stability: Returns the state of gradient norms and skipped steps that a resumed run needs.
        cursor: Returns the positions of this rank's data lanes; empty for data without state.
        skips: Batches that this process leaves out.
    """

    inputs: RunInputs
    begun: Meta
    saved_step: int = 0
    tokenizer: Path | None = None
    stability: Callable[[], dict[str, Any]] = dict
    cursor: Callable[[], dict[int, LanePosition]] = dict
    skips: Skips = ()


class Checkpoints(RunObserver):
    """Writer of a run's checkpoints at its save steps. Every rank creates one and calls it at the same steps.

    Args:
        plan: Validated configuration.
        state: Training state to save.
        identity: Contents besides the tensors.
        print_line: Prints a line for the user.
        mirrored: Mirror of the checkpoints; None for no mirror.
        goodput: Meter of the run, which counts the seconds of each save; None for no meter.

    Attributes:
        saved_step: Step of the newest checkpoint; 0 for none.
    """

    def __init__(
        self,
        plan: Resolved,
        state: TrainState,
        identity: RunIdentity,
        print_line: Callable[[str], None],
        mirrored: Mirrored | None = None,
        goodput: GoodputMeter | None = None,
    ) -> None:
        config, backend = plan.config, state.backend
        self._plan, self._state = plan, state
        self._identity = identity
        self._print_line = print_line
        self._goodput = goodput
        self._outcomes: list[SaveOutcome] = []
        self._failed = ""
        self.saved_step = identity.saved_step
        retention = Retention(config.checkpoint.keep, config.checkpoint.keep_every)
        uploader = None
        if mirrored is not None:
            uploading = Ranks(state.mesh, backend.background_group(TIMEOUT_S))
            uploader = MirrorUploader(mirrored.mirror, retention, uploading)
        writers = Ranks(state.mesh, backend.background_group(config.recovery.hang_timeout_s))
        scope = replace(mirrored.scope, ranks=writers) if mirrored else StorageScope(writers)
        self._writer = CheckpointWriter(
            Destination(config.run.dir / CHECKPOINTS_DIR, scope, retention, identity.tokenizer),
            state.layout,
            state.ranks,
            background=config.checkpoint.async_,
            uploader=uploader,
            pin=backend.pin,
        )

    def save(self, step: int, last: bool) -> None:
        """Save the training state after a step.

        Args:
            step: Number of finished updates.
            last: True for the last checkpoint of the run, whose write is waited for.

        Raises:
            CheckpointError: The last checkpoint was not written, or with `checkpoint.strict` an earlier checkpoint was
                not.
        """
        cursor = self._identity.cursor()
        positions = merged(self._state.ranks.gather(cursor)) if cursor else {}
        meta = self.meta_at(step, self._identity.stability()).model_copy(update={"data_cursor": positions})
        state = self._state
        if state.loss_scale is not None:
            scale = state.loss_scale.kept(state.backend.fetch, state.optimizer.num_updates[0])
            meta = meta.model_copy(update={"loss_scale": scale})
        strict = self._plan.config.checkpoint.strict
        self._writer.save(self.shards, meta, wait=last, after_failure=not strict)
        self._report()
        if last and self._failed:
            raise CheckpointError(self._failed)

    def meta_at(self, step: int, stability: Mapping[str, Any]) -> Meta:
        """Metadata of a checkpoint at a step, except numbers on a device or another rank.

        Args:
            step: Number of finished updates.
            stability: State of gradient norms and skipped steps.
        """
        begun = self._identity.begun
        meta = meta_at(step, self._plan, self._identity.inputs, begun)
        sizes = self._plan.config.train.batch_sizes(begun.step, begun.tokens)
        skipped = rows_left_out(self._identity.skips, begun.step, step - 1, sizes)
        return meta.model_copy(update={"stability": stability, "samples": meta.samples + skipped})

    def enter(self, step: int, work: Work) -> None:
        """Report finished uploads, and the outcome of the last checkpoint's write once it has ended.

        With `checkpoint.strict` a failed write is reported at the next save, where it ends the run on all ranks.
        """
        self._report(saves=not self._plan.config.checkpoint.strict)

    def measure(self, step: int) -> Mapping[str, float]:
        return {"saved_step": self.saved_step} if self.saved_step else {}

    def close(
        self,
        *,
        is_urgent: bool = False,
        heartbeat: Callable[[], None] = lambda: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for the last checkpoint and its upload to the mirror; nothing can be saved afterwards.

        The wait continues while any rank uploads bytes, with pauses of at most `recovery.grace_s`.

        Args:
            is_urgent: True if the launcher may wait for the exit; all uploads together then get half of
                `recovery.grace_s`.
            heartbeat: Called repeatedly during the wait for uploads.
            stop_requested: Returns True once this rank got a stop signal, so that the launcher may wait for the exit.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        grace_s = self._plan.config.recovery.grace_s
        deadline = UploadDeadline(grace_s, after_stop_s=0.5 * grace_s)
        if is_urgent:
            deadline = UploadDeadline(grace_s, 0.5 * grace_s)
        with closing(self._writer) as writer:
            writer.settle()
            self._report()
            writer.drain(deadline, heartbeat, stop_requested)
            self._report()
        if self._failed:
            raise CheckpointError(self._failed)

    def shards(self) -> Shards:
        """Tensors of the current training state, as a checkpoint stores them."""
        shards = shards_of(self._state)
        self._state.backend.step_boundary()  # lazy devices would otherwise compute each cast alone, as it is read
        return shards

    def _report(self, *, saves: bool = True) -> None:
        """Print the outcomes of finished uploads and, if `saves`, of finished checkpoint writes."""
        for outcome in self._writer.poll():
            if isinstance(outcome, SaveOutcome):
                self._outcomes.append(outcome)
            elif outcome.problem:
                line = f"WARNING: the mirror lacks the checkpoint of step {outcome.step}: {outcome.problem}"
                self._print_line(f"{line}; it is in {self._plan.config.run.dir}, and that is enough to go on")
            elif outcome.untidy:
                line = f"WARNING: the mirror has the checkpoint of step {outcome.step}, but older ones stay"
                self._print_line(f"{line}: {outcome.untidy}")
        while saves and self._outcomes:
            self._report_save(self._outcomes.pop(0))

    def _report_save(self, outcome: SaveOutcome) -> None:
        self._failed = outcome.problem
        if outcome.note:
            self._print_line(outcome.note)
        if not outcome.problem:
            self.saved_step = outcome.step
        if not outcome.problem and self._goodput is not None:
            self._goodput.saved(outcome.stall_s, outcome.write_s)
        if outcome.problem and self._plan.config.checkpoint.strict:
            raise CheckpointError(f"no checkpoint of step {outcome.step}: {outcome.problem}")
        if outcome.problem:
            self._print_line(f"WARNING: no checkpoint of step {outcome.step}: {outcome.problem}; training goes on")
        for failed in outcome.untidy:
            self._print_line(f"WARNING: {failed}; the checkpoint of step {outcome.step} is there, and training goes on")
