"""Data loader worker: a process that tokenizes and packs documents ahead of its rank, and exits with its rank.

The rank starts the worker as a separate program, since a fork of a process with devices or threads is unsafe. The
program imports no torch. Standard input has the task, and then one byte for each requested step. The worker exits when
standard input is closed. Standard output gets an answer for each step.
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
"""Header of an answer: the number of bytes that follow."""

MARK_BYTES = 4096
"""Size of the file in which a worker records the name of the document that it is reading."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class WorkerTask:
    """Lanes and positions whose rows a data loader worker prepares.

    Args:
        source: Source of the lanes.
        order: Order of the documents.
        positions: Position of each lane.
        rows_per_lane: Rows of a lane in each step.
        mark: Descriptor of the file that records the current document.
    """

    source: LaneSource
    order: LaneOrder
    positions: dict[int, LanePosition]
    rows_per_lane: int
    mark: int


Answer = LaneRows | tuple[type[NxtrainError], str]
"""Answer of a worker: the rows of a step, or the type and message of an error that ends the worker."""


def main() -> None:
    """Run a data loader worker until its rank closes standard input or ends."""
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
    """Read bytes from standard input; exit the process at its end, since the rank has then ended."""
    content: bytes = source.read(size)
    if len(content) < size:
        os._exit(0)
    return content


def _follow(source: Any, wanted: threading.Semaphore) -> None:
    """Count the requested steps, and exit the process at the end of standard input, even if it is busy."""
    while _read(source, 1):
        wanted.release()
