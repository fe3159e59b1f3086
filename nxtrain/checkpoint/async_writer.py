"""Asynchronous checkpoints: tensors are copied to the host while training waits, and written while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.dcp_storage import Staged, Staging
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror_uploads import MirrorUploader, UploadDeadline
from nxtrain.checkpoint.save import tidy, write_state
from nxtrain.checkpoint.shards import Shards
from nxtrain.distributed.agreement import Ranks, StorageScope
from nxtrain.errors import CheckpointError
from nxtrain.sharding import Layout


@dataclass(frozen=True)
class Outcome:
    """Result of saving one checkpoint.

    Args:
        step: Step of the checkpoint.
        stall_s: Seconds that training waited for the checkpoint.
        write_s: Seconds until the checkpoint was written, committed and read back; 0 if it was skipped.
        problem: Reason why the checkpoint is missing; empty if it was saved.
        untidy: Failures after the commit, such as of retention; the checkpoint is saved nevertheless.
    """

    step: int
    stall_s: float
    write_s: float = 0.0
    problem: str = ""
    untidy: tuple[str, ...] = ()


class AsyncCheckpointWriter:
    """Writes checkpoints of a run, one at a time. Every rank makes one writer, and calls it at the same steps.

    A failed write loses only that checkpoint: training goes on, and older checkpoints are untouched.

    Args:
        folder: The `checkpoints` folder.
        layout: Entries of the model's tensors that this rank holds.
        retention: Checkpoints that stay.
        tokenizer: A `tokenizer.json` to save with each checkpoint.
        scope: The ranks and their folders, over a group beside the collectives of training. A group of None: there is
            only this rank, or no group can; checkpoints are then written while training waits.
        ranks: All ranks, over the group on which they agree before they go on.
        background: Write while training goes on.
        told: Called between steps with the outcome of each checkpoint.
        copies: Uploader of saved checkpoints to a mirror; None: the run has no mirror.
        copied: Called between steps with the step of each upload and the reason why it failed; empty if it succeeded.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        *,
        retention: Retention,
        tokenizer: Path | None,
        scope: StorageScope,
        ranks: Ranks,
        background: bool,
        told: Callable[[Outcome], None],
        copies: MirrorUploader | None = None,
        copied: Callable[[int, str], None] = lambda step, problem: None,
    ) -> None:
        self._folder, self._layout, self._retention, self._tokenizer = folder, layout, retention, tokenizer
        self._scope, self._ranks, self._on_outcome = scope, ranks, told
        self._background, self._uploader, self._on_upload = background, copies, copied
        self._staging = Staging(layout)
        self._underway: _Writing | None = None
        self._written: int | None = None

    def save(self, shards: Callable[[], Shards], meta: Meta, *, must: bool = False) -> None:
        """Save the state after a step, unless the previous checkpoint is still being written.

        Args:
            shards: Returns the local tensors by kind and parameter.
            meta: The rest of the state.
            must: Wait for the previous checkpoint instead, and until this one is written. A step that is saved already
                is not saved again.
        """
        began = time.monotonic()
        if not must and self._is_busy():
            problem = "the one before it is still being written"
            self._on_outcome(Outcome(meta.step, time.monotonic() - began, problem=problem))
            return
        self.settle()
        if self._written == meta.step:
            return
        state = shards()
        staged = self._staging.fill(state)
        self._underway = _Writing(meta.step, began, lambda: self._write(staged, meta, tuple(state)))
        if must or not self._background:
            self._underway.run()
            self.settle()
        else:
            self._underway.start()

    def settle(self) -> Outcome | None:
        """Wait for the checkpoint that is being written, if any, and report its outcome."""
        if self._underway is None:
            return None
        outcome = self._underway.outcome()
        self._underway = None
        self._written = None if outcome.problem else outcome.step
        self._on_outcome(outcome)
        return outcome

    def report(self) -> None:
        """Report the outcome of the last checkpoint, if its write has ended; never waits."""
        if self._underway is not None and self._underway.done:
            self.settle()

    def report_copies(self) -> None:
        """Report the uploads that have ended; never waits."""
        for step, problem in self._uploader.ended() if self._uploader is not None else ():
            self._on_upload(step, problem)

    def close(
        self,
        patience: UploadDeadline,
        alive: Callable[[], None] = lambda: None,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for the last checkpoint, and for its upload until a deadline; nothing can be saved afterwards.

        Args:
            patience: Deadline of the uploads.
            alive: Heartbeat; called again and again during the wait for uploads.
            asked: True once this rank is asked to stop.
        """
        try:
            self.settle()
            if self._uploader is not None:
                self._finish_uploads(self._uploader, patience, alive, asked)
        finally:
            if self._scope.ranks.group is not None:
                dist.destroy_process_group(self._scope.ranks.group)

    def _finish_uploads(
        self, uploader: MirrorUploader, deadline: UploadDeadline, alive: Callable[[], None], asked: Callable[[], bool]
    ) -> None:
        uploader.wait(deadline, self._ranks, alive, asked)
        self.report_copies()
        for step in sorted(uploader.underway):
            self._on_upload(step, "the run ends, and its copy is still under way")

    def _is_busy(self) -> bool:
        # The leader ends last: it commits and deletes old checkpoints after all others have written.
        return self._ranks.on_leader(
            lambda: self._underway is not None and not self._underway.done, "cannot ask for the checkpoint before"
        )

    def _write(self, staged: Staged, meta: Meta, kinds: tuple[str, ...]) -> tuple[str, ...]:
        path = directory.step_path(self._folder, meta.step)
        written = write_state(path, staged, meta.model_copy(update={"kinds": kinds}), self._scope, self._tokenizer)
        underway = self._uploader.underway if self._uploader is not None else ()
        failed = tidy(path, self._retention, self._scope, underway)
        if self._uploader is not None:
            self._uploader.offer(meta.step, path, written, self._scope.ranks)
        return tuple(failed)


class _Writing(Thread):
    """Thread that writes one checkpoint.

    Args:
        step: Step of the checkpoint.
        began: Time at which training began to wait for the checkpoint.
        write: Writes the checkpoint; returns failures after the commit.
    """

    def __init__(self, step: int, began: float, write: Callable[[], tuple[str, ...]]) -> None:
        # A process that ends early, because a rank failed, does not wait: an uncommitted checkpoint does not count.
        super().__init__(name="nxtrain-checkpoint", daemon=True)
        self._step, self._began, self._work = step, began, write
        self._staged = time.monotonic()
        self._error: BaseException | None = None
        self._untidy: tuple[str, ...] = ()
        self._ended = self._staged
        self.done = False

    def run(self) -> None:
        """Write the checkpoint."""
        try:
            self._untidy = self._work()
        except BaseException as error:  # `outcome` raises it in the thread of training
            self._error = error
        self._ended = time.monotonic()
        self.done = True

    def outcome(self) -> Outcome:
        """Wait for the end of the write, and return its outcome."""
        if self.is_alive():
            self.join()
        if self._error is not None and not isinstance(self._error, CheckpointError):
            raise self._error
        problem = str(self._error or "")
        stall_s, write_s = self._staged - self._began, self._ended - self._staged
        return Outcome(self._step, stall_s, write_s, problem, self._untidy)
