"""Worker process of a rank: makes the rows of some lanes ahead of the rank, and ends with the rank.

The rank starts the process as a program of its own, not as a fork: a fork of a process with devices or threads is
unsafe. The program imports no torch. Standard input brings the task and then a byte for each wanted step; its end is
the end of the rank. Standard output takes an answer for each step.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from nxtrain.common.errors import NxtrainError
from nxtrain.common.process.signals import STOPPING
from nxtrain.data.stream_loader import LaneOrder, LanePosition, LaneRows, LaneSource, LocalLanes

LENGTH = struct.Struct("<Q")
"""Head of an answer: the number of bytes that follow."""

MARK_BYTES = 4096
"""Bytes of the file in which a worker notes the document under way."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class WorkerTask:
    """Rows that a worker makes.

    Args:
        mark: Descriptor of the file for the document that is read.
    """

    source: LaneSource
    order: LaneOrder
    positions: dict[int, LanePosition]
    rows_per_lane: int
    mark: int


Answer = LaneRows | tuple[type[NxtrainError], str]
"""Rows of a step; or the kind and the text of an error that ends the worker."""


def main() -> None:
    """Work until the rank closes standard input or ends."""
    for number in STOPPING:  # a signal to the whole process group asks the rank, which still needs its workers
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    source = sys.stdin.buffer
    task: WorkerTask = pickle.loads(_read(source, LENGTH.unpack(_read(source, LENGTH.size))[0]))
    wanted = threading.Semaphore(0)
    threading.Thread(target=_follow, args=(source, wanted), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may print between the answers
    try:
        _work(task, wanted, answers)
    except BrokenPipeError:
        os._exit(0)


def _work(task: WorkerTask, wanted: threading.Semaphore, answers: BinaryIO) -> None:
    def mark(text: str) -> None:
        os.pwrite(task.mark, text.encode()[: MARK_BYTES - 1] + b"\0", 0)

    try:
        open_lane = task.source.opened(mark)
        lanes = LocalLanes(
            lambda lane, position: open_lane(task.order, lane, position), task.positions, task.rows_per_lane
        )
        step = 0
        while wanted.acquire():
            _send(answers, lanes.rows(step))
            step += 1
    except NxtrainError as error:
        _send(answers, (type(error), str(error)))


def _send(answers: BinaryIO, answer: Answer) -> None:
    content = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
    answers.write(LENGTH.pack(len(content)))
    answers.write(content)
    answers.flush()


def _read(source: Any, size: int) -> bytes:
    """Next bytes of standard input; the end of standard input ends the process, because the rank has ended."""
    content: bytes = source.read(size)
    if len(content) < size:
        os._exit(0)
    return content


def _follow(source: Any, wanted: threading.Semaphore) -> None:
    """Count the wanted steps, and end the process at the end of standard input, whatever the main thread does."""
    while _read(source, 1):
        wanted.release()
