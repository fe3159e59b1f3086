"""Data loader workers of a rank: processes that tokenize and pack, with replacement of dead or hung processes.

The lanes of the rank are divided among the workers. For each step, a worker returns the rows of its lanes and the lane
positions after them. A replacement begins at the positions of the last received answer. The rows therefore depend
neither on the number of workers nor on failures.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from signal import SIGKILL, Signals

from nxtrain.common.errors import WorkerError
from nxtrain.common.process.console import standard_error
from nxtrain.data.stream_loader import LaneOrder, LanePosition, LaneRows, LaneSource
from nxtrain.data.worker import LENGTH, MARK_BYTES, Answer, WorkerTask

AHEAD = 4
"""Number of steps that a worker prepares ahead of the rank."""

_PIPE_BYTES = 1 << 20
"""Requested size of the answer pipe, so that a worker seldom waits for its reader."""

_READ_BYTES = 1 << 20

_START_S, _ENDING_S = 60.0, 5.0
"""Extra timeout in seconds for a starting worker, and seconds to wait for the end of a killed worker."""


@dataclass(frozen=True)
class WorkerPolicy:
    """Number of data loader workers, and the handling of failed workers.

    Args:
        number: Number of processes, limited to the number of lanes.
        restarts: Maximum number of consecutive replacements without an answer from the new worker.
        timeout_s: Seconds without an answer and without a new document, after which a worker counts as hung. A starting
            worker has a minute more.
        rank: Rank, for messages.
    """

    number: int
    restarts: int
    timeout_s: float
    rank: int = 0


class _SilentError(Exception):
    """Error of a worker that returns no answer; its text has the reason."""


class DataWorker:
    """A data loader worker process, as controlled by its rank."""

    def __init__(
        self, source: LaneSource, order: LaneOrder, positions: dict[int, LanePosition], rows_per_lane: int
    ) -> None:
        self._mark = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        mark = self._mark.fileno()
        # The paths are those of this process, where the current folder may not be among them.
        code = f"import sys; sys.path[:] = {sys.path!r}; from nxtrain.data.worker import main; main()"
        alone = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(mark,),
            env={**os.environ, **alone},
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._held = bytearray()
        if sys.platform == "linux":
            import fcntl

            with suppress(OSError):  # the limit of pipes of this user
                fcntl.fcntl(self._answers, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        task = pickle.dumps(WorkerTask(source, order, positions, rows_per_lane, mark))
        self._request(LENGTH.pack(len(task)) + task + bytes(AHEAD))

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def mark(self) -> str:
        """Name of the document that the worker is reading; empty before the first document."""
        return os.pread(self._mark.fileno(), MARK_BYTES, 0).partition(b"\0")[0].decode(errors="replace")

    def answer(self, timeout_s: float) -> Answer:
        """Receive the next answer, and request a further step."""
        while len(self._held) < LENGTH.size:
            self._receive(timeout_s)
        (size,) = LENGTH.unpack_from(self._held)
        while len(self._held) < LENGTH.size + size:
            self._receive(timeout_s)
        with memoryview(self._held) as held:  # read in place: a step of a large batch has megabytes
            answer: Answer = pickle.loads(held[LENGTH.size : LENGTH.size + size])
        del self._held[: LENGTH.size + size]
        self._request(b"\0")
        return answer

    def signal(self, number: int) -> None:
        """Send a signal to the worker process, if it still runs."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Kill the worker process; callable from any thread."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # a read from storage that hangs cannot be killed
            self._process.wait(_ENDING_S)

    def close(self) -> None:
        """Kill the worker process, and close its pipes."""
        self.stop()
        for file in (self._requests, self._answers, self._mark):
            with suppress(BrokenPipeError):
                file.close()

    def _request(self, content: bytes) -> None:
        with suppress(BrokenPipeError):  # the end of the answers says why
            self._requests.write(content)

    def _receive(self, timeout_s: float) -> None:
        """Receive the next bytes of an answer. A worker that begins to read another document does not count as hung."""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        mark = self.mark
        limit = time.monotonic() + timeout_s
        if not mark:
            limit += _START_S
        while not poll.poll(max(1.0, 250 * timeout_s)):
            if self.mark != mark:
                mark, limit = self.mark, time.monotonic() + timeout_s
            elif time.monotonic() > limit:
                raise _SilentError(f"has not answered for {timeout_s:g} seconds")
        content = os.read(self._answers.fileno(), _READ_BYTES)
        if not content:
            code = self._process.wait()
            if code < 0:
                raise _SilentError(f"was ended by {Signals(-code).name}")
            raise _SilentError(f"ended with exit code {code}; its last lines of output show why")
        self._held += content


class Workers:
    """Data loader workers of a rank, which return the same rows as `LocalLanes`."""

    def __init__(
        self,
        source: LaneSource,
        order: LaneOrder,
        policy: WorkerPolicy,
        positions: Mapping[int, LanePosition],
        rows_per_lane: int,
    ) -> None:
        self._source, self._order = source, order
        self._policy, self._rows_per_lane = policy, rows_per_lane
        number = min(policy.number, len(positions))
        self._positions: list[dict[int, LanePosition]] = []
        for worker in range(number):
            lanes = sorted(positions)[worker::number]
            self._positions.append({lane: positions[lane] for lane in lanes})
        self._closing = threading.Lock()
        self._closed = False
        self.members = [self._start(worker) for worker in range(number)]

    def rows(self, step: int) -> LaneRows:
        """Rows of each lane for the next step, and the lane positions after these rows."""
        by_lane: LaneRows = {}
        for number in range(len(self.members)):
            by_lane |= self._rows_of(number, step)
        return dict(sorted(by_lane.items()))

    def stop(self) -> None:
        """Kill the worker processes; callable from any thread. A call of `rows` in another thread ends."""
        with self._closing:
            self._closed = True
            for worker in self.members:
                worker.stop()

    def close(self) -> None:
        """Kill the worker processes, and close their pipes; no thread may still call `rows`."""
        self.stop()
        for worker in self.members:
            worker.close()

    def _start(self, number: int) -> DataWorker:
        return DataWorker(self._source, self._order, self._positions[number], self._rows_per_lane)

    def _rows_of(self, number: int, step: int) -> LaneRows:
        failures = 0
        while True:
            worker = self.members[number]
            try:
                answer = worker.answer(self._policy.timeout_s)
            except _SilentError as failure:
                failures += 1
                self._replace(number, step, f"{failure}", failures)
                continue
            if isinstance(answer, tuple):
                kind, text = answer
                raise kind(f"{text} (found by data worker {number} of rank {self._policy.rank})")
            self._positions[number] = {lane: position for lane, (_, position) in answer.items()}
            return answer

    def _replace(self, number: int, step: int, why: str, failures: int) -> None:
        """Replace a failed worker by a new one, which begins at the positions of the last received answer."""
        old, policy = self.members[number], self._policy
        state = "it had read no document"
        document = old.mark
        if document:
            state = f"it was reading {document}"
        head = f"data worker {number} of rank {policy.rank} (process {old.pid}) {why}"
        message = f"{head}, before its rows of step {step + 1}; {state}"
        with self._closing:
            if self._closed or failures > policy.restarts:
                raise WorkerError(f"{message}. data.worker_restarts={policy.restarts} allows no further replacement")
            warning = f"WARNING: {message}; a new worker continues after the last received row"
            standard_error().print(warning, style="yellow")
            old.signal(SIGKILL)
            old.close()
            self.members[number] = self._start(number)
