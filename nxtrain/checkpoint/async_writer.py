"""The checkpoints of a run: copied to the host while training waits, written while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror_uploads import Copies, Patience
from nxtrain.checkpoint.save import Retention, tidy, write_state
from nxtrain.checkpoint.shards import Shards
from nxtrain.checkpoint.staging import Staged, Staging
from nxtrain.distributed.agreement import Disk, Group, by_leader
from nxtrain.errors import CheckpointError
from nxtrain.sharding import Layout


@dataclass(frozen=True)
class Outcome:
    """What became of a checkpoint.

    Args:
        step: Its step.
        stall_s: Seconds that training waited for it.
        write_s: Seconds until it was written, committed and read back; 0 if it was left out.
        problem: Why it is not there; empty if it is.
        untidy: What failed afterwards, and costs no checkpoint.
    """

    step: int
    stall_s: float
    write_s: float = 0.0
    problem: str = ""
    untidy: tuple[str, ...] = ()


class Saver:
    """Writes checkpoints of a run, one at a time. Every rank makes one, and calls it at the same steps.

    A checkpoint that cannot be written costs nothing but itself: training goes on, and older ones are untouched.

    Args:
        folder: The `checkpoints` folder.
        cut: Where this rank's tensors lie in the model.
        retention: Which checkpoints stay.
        tokenizer: A `tokenizer.json` to keep with each.
        group: Group of all ranks that can carry host objects while training talks; None: only this rank, or none can,
            and checkpoints are written while training waits.
        talk: Group on which the ranks talk before they go on; None for the default group.
        background: Write while training goes on.
        told: Is told, between steps, what became of each checkpoint.
        copies: What brings checkpoints to a mirror once they are there; None: there is none.
        disk: Who acts in the folder; None: rank 0 for all.
        copied: Is told, between steps, the step of each copy and why it is not in the mirror; empty if it is.
    """

    def __init__(
        self,
        folder: Path,
        cut: Layout,
        *,
        retention: Retention,
        tokenizer: Path | None,
        group: Group,
        talk: Group,
        background: bool,
        told: Callable[[Outcome], None],
        copies: Copies | None = None,
        disk: Disk | None = None,
        copied: Callable[[int, str], None] = lambda step, problem: None,
    ) -> None:
        self._folder, self._cut, self._retention, self._tokenizer = folder, cut, retention, tokenizer
        self._group, self._talk, self._told = group, talk, told
        self._background, self._copies, self._disk, self._copied = background, copies, disk, copied
        self._staging = Staging(cut)
        self._underway: _Writing | None = None
        self._written: int | None = None

    def save(self, shards: Callable[[], Shards], meta: Meta, *, must: bool = False) -> None:
        """Save the state after a step, unless the checkpoint before is still being written.

        Args:
            shards: Gives the local tensors by kind and parameter.
            meta: The rest of the state.
            must: Wait for the one before instead, and until this one is written; nothing is done if it is already.
        """
        began = time.monotonic()
        if not must and self._is_busy():
            problem = "the one before it is still being written"
            self._told(Outcome(meta.step, time.monotonic() - began, problem=problem))
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
        """Wait for the checkpoint that is being written, if any, and tell what became of it."""
        if self._underway is None:
            return None
        outcome = self._underway.outcome()
        self._underway = None
        self._written = None if outcome.problem else outcome.step
        self._told(outcome)
        return outcome

    def report(self) -> None:
        """Tell what became of the last checkpoint, if it is written; costs nothing."""
        if self._underway is not None and self._underway.done:
            self.settle()

    def report_copies(self) -> None:
        """Tell what became of copies; costs nothing."""
        for step, problem in self._copies.ended() if self._copies is not None else ():
            self._copied(step, problem)

    def close(
        self, patience: Patience, alive: Callable[[], None] = lambda: None, asked: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for the last checkpoint, and for its copy as long as there is patience; none can be written after it.

        Args:
            patience: For copies.
            alive: Is called all the time while they are waited for.
            asked: Whether this rank is asked to stop.
        """
        try:
            self.settle()
            if self._copies is not None:
                self._leave(self._copies, patience, alive, asked)
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def _leave(self, copies: Copies, patience: Patience, alive: Callable[[], None], asked: Callable[[], bool]) -> None:
        copies.wait(patience, alive, asked)
        self.report_copies()
        for step in sorted(copies.underway):
            self._copied(step, "the run ends, and its copy is still under way")

    def _is_busy(self) -> bool:
        # The leader ends last: it commits and makes room when all others have written.
        return by_leader(
            lambda: self._underway is not None and not self._underway.done,
            self._cut.mesh,
            self._talk,
            "cannot ask for the checkpoint before",
        )

    def _write(self, staged: Staged, meta: Meta, kinds: tuple[str, ...]) -> tuple[str, ...]:
        path, mesh, group = directory.step_path(self._folder, meta.step), self._cut.mesh, self._group
        written = write_state(path, staged, mesh, meta, kinds, self._tokenizer, group, self._disk)
        underway = self._copies.underway if self._copies is not None else ()
        failed = tidy(path, self._retention, mesh, group, self._disk, underway)
        if self._copies is not None:
            self._copies.offer(meta.step, path, written, group)
        return tuple(failed)


class _Writing(Thread):
    """A checkpoint that is being written.

    Args:
        step: Its step.
        began: When training began to wait for it.
        write: Writes it, and tells what failed although it is there.
    """

    def __init__(self, step: int, began: float, write: Callable[[], tuple[str, ...]]) -> None:
        # A process that ends early, because a rank failed, waits for nothing: what is not committed does not count.
        super().__init__(name="nxtrain-checkpoint", daemon=True)
        self._step, self._began, self._work = step, began, write
        self._staged = time.monotonic()
        self._error: BaseException | None = None
        self._untidy: tuple[str, ...] = ()
        self._ended = self._staged
        self.done = False

    def run(self) -> None:
        """Write it."""
        try:
            self._untidy = self._work()
        except BaseException as error:  # it is raised where training waits
            self._error = error
        self._ended = time.monotonic()
        self.done = True

    def outcome(self) -> Outcome:
        """Wait for it, and say what became of it."""
        if self.is_alive():
            self.join()
        if self._error is not None and not isinstance(self._error, CheckpointError):
            raise self._error
        problem = str(self._error or "")
        stall_s, write_s = self._staged - self._began, self._ended - self._staged
        return Outcome(self._step, stall_s, write_s, problem, self._untidy)
