"""Asynchronous checkpoints: training waits while tensors are copied to the host, and continues while they are written.

If a host lacks memory for the copies, tensors are written one by one while training waits.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror_uploads import MirrorUploader, UploadDeadline, UploadOutcome
from nxtrain.checkpoint.save import tidy, write_state
from nxtrain.checkpoint.shards import Shards
from nxtrain.checkpoint.staging import Pin, Staged, Staging
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import CheckpointError
from nxtrain.common.process.background import BackgroundTask
from nxtrain.common.sharding import Layout


@dataclass(frozen=True)
class SaveOutcome:
    """Result of saving one checkpoint.

    Args:
        stall_s: Seconds that training waited for the checkpoint.
        write_s: Seconds until the checkpoint was written, committed and read back; 0 if it was skipped.
        problem: Reason why the checkpoint is missing; empty if it was saved.
        untidy: Failures after the commit, such as in retention; the checkpoint is saved nevertheless.
        note: Log line about a change between asynchronous and synchronous saving; empty without a change.
    """

    step: int
    stall_s: float
    write_s: float = 0.0
    problem: str = ""
    untidy: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Destination:
    """Folder of a run's checkpoints, and the ranks that write to it.

    If the group of `scope` is None, checkpoints are written while training waits.
    """

    folder: Path
    scope: StorageScope
    retention: Retention
    tokenizer: Path | None = None


class CheckpointWriter:
    """Writer of a run's checkpoints, one at a time. Every rank creates a writer, and calls it at the same steps.

    A failed write loses only its checkpoint: training continues, and older checkpoints are untouched.
    """

    def __init__(
        self,
        destination: Destination,
        layout: Layout,
        ranks: Ranks,
        *,
        background: bool = True,
        uploader: MirrorUploader | None = None,
        pin: Pin = lambda memory: None,
    ) -> None:
        self._destination = destination
        self._ranks = ranks
        self._background = background
        self._uploader = uploader
        self._staging = Staging(layout, pin)
        self._underway: BackgroundTask[SaveOutcome] | None = None
        self._ended: list[SaveOutcome | UploadOutcome] = []
        self._written: int | None = None
        self._failed = False
        self._has_noted = False

    def save(self, shards: Callable[[], Shards], meta: Meta, *, wait: bool = False, after_failure: bool = True) -> None:
        """Save the training state after a step; skip the step if the previous checkpoint is still being written.

        A step that is already saved is not saved again.

        Args:
            shards: Function that returns this rank's tensors.
            meta: Description of the checkpoint.
            wait: Wait for the previous checkpoint, and for this checkpoint.
            after_failure: Save although the previous checkpoint failed.
        """
        began = time.monotonic()
        # The leader finishes last: it commits and deletes old checkpoints after all other ranks have written.
        if not wait and self._ranks.on_leader(
            lambda: self._underway is not None and not self._underway.done, "cannot ask for the checkpoint before"
        ):
            problem = "the one before it is still being written"
            self._ended.append(SaveOutcome(meta.step, time.monotonic() - began, problem=problem))
            return
        self.settle()
        if self._written == meta.step or (self._failed and not after_failure):
            return
        state = shards()
        lack = ""  # message about a host without memory for the copies of its ranks, equal on all ranks
        if not self._staging.is_allocated:
            lack = self._full_host(state) or self._refusing_host(state)
        if lack:
            lack += ": checkpoints are written while training waits until it fits"
        note = ""
        if not self._has_noted:
            note = lack
        self._has_noted = bool(lack)
        copy = self._staging.fill
        if lack:
            copy = self._staging.refer
        staged = copy(state)
        meta = meta.model_copy(update={"kinds": tuple(state)})
        self._underway = BackgroundTask("nxtrain-checkpoint", partial(self._write, staged, meta, began, note))
        if wait or lack or not self._background:
            self._underway.run()
            self.settle()
        else:
            self._underway.start()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._underway is None:
            return
        outcome = self._underway.result()
        self._underway = None
        self._failed = bool(outcome.problem)
        self._written = None
        if not self._failed:
            self._written = outcome.step
        self._ended.append(outcome)

    def poll(self) -> list[SaveOutcome | UploadOutcome]:
        """Return the results of saves and uploads that ended since the last call, without waiting."""
        if self._underway is not None and self._underway.done:
            self.settle()
        ended, self._ended = self._ended, []
        if self._uploader is None:
            return ended
        return [*ended, *self._uploader.poll()]

    def drain(
        self,
        deadline: UploadDeadline,
        heartbeat: Callable[[], None] = lambda: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for the last checkpoint to be written, and until a deadline for its upload."""
        self.settle()
        uploader = self._uploader
        if uploader is not None:
            uploader.drain(deadline, self._ranks, heartbeat, stop_requested)
            self._ended += uploader.poll()
            problem = "the run ends, and its copy is still under way"
            self._ended += [UploadOutcome(step, problem) for step in sorted(uploader.underway)]

    def close(self) -> None:
        """Free the host memory and the writer's process group; nothing can be saved afterwards."""
        if self._underway is None or self._underway.done:
            self._staging.release()
        group = self._destination.scope.ranks.group
        if group is not None:
            dist.destroy_process_group(group)

    def _full_host(self, state: Shards) -> str:
        """Message about a host with less free memory than its ranks' copies need; empty if all hosts have enough."""
        mine = (socket.gethostname(), self._staging.num_bytes(state), free_memory_bytes())
        needed, free = Counter[str](), dict[str, int]()
        for host, num_bytes, free_bytes in self._ranks.gather(mine):
            needed[host] += num_bytes
            free[host] = min(free_bytes, free.get(host, free_bytes))
        for host, num_bytes in needed.items():
            if num_bytes > free[host]:
                return (
                    f"{host} has {free[host] / GIB:.3f} GiB of free memory, and the copy of a checkpoint takes "
                    f"{num_bytes / GIB:.3f} GiB"
                )
        return ""

    def _refusing_host(self, state: Shards) -> str:
        """Allocate host memory for the copies on all ranks, or on no rank if a host refuses.

        A limit per process, such as `ulimit -v`, takes effect only at the allocation.

        Returns:
            Message about a host that refuses the memory; empty if all ranks have memory.
        """
        refusal = ""
        try:
            self._staging.allocate(state)
        except OSError as error:
            size = self._staging.num_bytes(state) / GIB
            refusal = f"{socket.gethostname()} refuses {size:.3f} GiB for the copy of a checkpoint ({error.strerror})"
        refusals = [text for text in self._ranks.gather(refusal) if text]
        if not refusals:
            return ""
        self._staging.release()
        return refusals[0]

    def _write(self, staged: Staged, meta: Meta, began: float, note: str) -> SaveOutcome:
        staged_at = time.monotonic()
        to, uploader = self._destination, self._uploader
        path = directory.step_path(to.folder, meta.step)
        untidy: list[str] = []
        in_use: list[int] = []
        problem = ""
        try:
            written = write_state(path, staged, meta, to.scope, to.tokenizer)
            if uploader is not None:
                in_use = uploader.underway
            untidy = tidy(path, to.retention, to.scope, in_use)
            if uploader is not None:
                uploader.offer(path, written, to.scope.ranks)
        except CheckpointError as error:
            problem = str(error)
        write_s = time.monotonic() - staged_at
        return SaveOutcome(meta.step, staged_at - began, write_s, problem, tuple(untidy), note)


GIB = 1 << 30


def free_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Free host memory in bytes, of this machine or of its container if the container has less.

    Source: https://docs.kernel.org/filesystems/proc.html, MemAvailable; https://docs.kernel.org/admin-guide/cgroup-v2.html,
    memory.max, memory.current, and inactive_file of memory.stat, which the kernel drops first.
    """
    free = [sys.maxsize]
    with suppress(OSError):
        free += [1024 * size for size in _numbers(proc / "meminfo", "MemAvailable:")]
    with suppress(OSError, ValueError):
        limit, used = (int((cgroup / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        free.append(limit - used + sum(_numbers(cgroup / "memory.stat", "inactive_file")))
    return min(free)


def _numbers(file: Path, name: str) -> list[int]:
    """Read the numbers of a kernel file's lines that begin with a name."""
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return [int(words[1]) for words in lines if words[:1] == [name]]
