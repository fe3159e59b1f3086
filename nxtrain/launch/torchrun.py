"""torchrun that ends with the exit code of the rank that failed, where torchrun itself always ends with 1.

It starts ranks again as torchrun does, but not after what every start would find again, such as a mistake in the
configuration or a graph that was not compiled: `--max-restarts` is for machines that fail, and counts anew once a run
got further than before. When a rank fails, the others may say what they know of it before they are ended. A signal to
stop goes to all ranks, which get time to save and then end with 75, as does this. Of several machines, an agent that
has lost another waits for it to be started again, and the run goes on.

A program and no library: the one module of this package that imports torch. It takes torchrun's options, as in
`python -m nxtrain.launch.torchrun --nproc-per-node=2 -m nxtrain train CONFIG`.
"""

from __future__ import annotations

# ruff: noqa: E402
# isort: off
# First of all: torch takes seconds to import, in which a request for stacks would end the process.
from nxtrain.process import stacks

stacks.answer_requests()
# isort: on

import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from types import FrameType
from typing import Any

from torch.distributed import DistError, run
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint
from torch.distributed.launcher import api

from nxtrain.config.load import load
from nxtrain.config.schema import RecoveryConfig
from nxtrain.errors import BackendError, ConfigError, DataError, DivergedError, StoppedBySignal
from nxtrain.launch.agent_rendezvous import Meeting, reasons, unmet
from nxtrain.launch.loopback import unreachable
from nxtrain.metrics.attempts import progress
from nxtrain.process.signals import STOPPING
from nxtrain.run_folder import LOGS_DIR, PROGRESS_FILE

FINAL = {kind.exit_code for kind in (ConfigError, DataError, BackendError, DivergedError)}
"""Exit codes of ranks that would end the same way again."""

STOPPED = StoppedBySignal.exit_code

LOST = 1
"""Exit code of an agent that others have left for good: as after a crash, the same command may help."""

PORT = 29400
"""Of torchrun's endpoints without one."""

LAST_WORDS_S = 5.0
"""What the others have, once a rank failed, to name whom they lost and to end by themselves."""

ENDING_S = 1.0
"""From SIGTERM to SIGKILL for ranks that are of no use any more; their state is valid whenever they are killed."""

REPEAT_S = 1.0
"""A signal that comes so soon after another is the same request."""

IGNORED = [number for number in STOPPING if signal.getsignal(number) is signal.SIG_IGN]
"""By the wish of whoever started this, as with `nohup`; ranks inherit it."""


class Ranks(SubprocessContext):
    """The processes of this node; they end faster than torch's, which have 30 seconds after another has failed."""

    @property
    def processes(self) -> list[Popen[bytes]]:
        """All of them."""
        return [handler.proc for handler in self.subprocess_handlers.values()]

    @property
    def alive(self) -> list[Popen[bytes]]:
        """Those that run."""
        return [process for process in self.processes if process.poll() is None]

    def _start(self) -> None:
        # Ranks inherit it: for a request for stacks until they answer it themselves. torch has its own handlers here.
        for number in (*IGNORED, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        super()._start()

    def _close(self, death_sig: signal.Signals, timeout: float = ENDING_S) -> None:
        # After one that ended for good the others would only tell what they met in its wake.
        for_good = FINAL.intersection(process.poll() for process in self.processes)
        for number in (signal.SIGKILL,) if for_good else (signal.SIGTERM, signal.SIGKILL):
            for process in self.alive:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            limit = time.monotonic() + ENDING_S
            for process in self.processes:
                with suppress(TimeoutExpired):
                    process.wait(max(0.0, limit - time.monotonic()))


class Agent(LocalElasticAgent):
    """Starts ranks again unless one of them ended for good, and lets them end well when it is to stop.

    Attributes:
        recovery: How long ranks may take to stop, set before the agent is made.
        progress: File that tells the last step of a run; None: nothing does.
        meeting: Where it meets the agents of other machines.
        stop: The signal that asks for a stop; 0: none came.
        starts: Times that agents of this process have started ranks.
    """

    recovery = RecoveryConfig()
    progress: Path | None = None
    meeting = Meeting()
    stop = 0
    starts = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked_at = self._limit = 0.0
        self._budget = self._remaining_restarts
        self._furthest = self._reached()
        if self.starts:
            self._count_restart()
        self._listen()

    def _listen(self) -> None:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN if number in IGNORED else self._note)
        signal.signal(signal.SIGUSR2, lambda number, frame: self._send(number))

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Ask the ranks to stop, and the second time to leave at once."""
        now = time.monotonic()
        if not self.stop:
            Agent.stop = number
            self._asked_at, self._limit = now, now + self.recovery.grace_s
        elif now - self._asked_at <= REPEAT_S:
            return
        else:
            self._limit = min(self._limit, now + ENDING_S)
        if not self._alive():
            raise SignalException("nothing runs yet", signal.Signals(number))
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._alive():
            process.send_signal(number)

    def _alive(self) -> list[Popen[bytes]]:
        return self._pcontext.alive if isinstance(self._pcontext, Ranks) else []

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torch's agents would let the ranks of all starts meet in the store of the first, among what those have left.
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, DynamicRendezvousHandler):
            handler._bootstrap_store_info = None
        with self.meeting.told():
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        Agent.starts += 1
        self._listen()  # torch has put its own handlers in place
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:  # another agent was started again
            self._count_restart()
        super()._restart_workers(worker_group)

    def _count_restart(self) -> None:
        """Let ranks know that they are started again, where torch counts only what follows a failure of theirs."""
        self._worker_group.spec.max_restarts += 1

    def _invoke_run(self, *args: Any, **kwargs: Any) -> RunResult:
        try:
            result: RunResult = super()._invoke_run(*args, **kwargs)
        except (RendezvousError, DistError):
            # The agent with the store is gone: perhaps since its ranks have stopped, as these are about to.
            self._let_end()
            codes = self._codes()
            if not codes or any(code not in {0, STOPPED} for code in codes):
                raise
            result = super()._monitor_workers(self._worker_group)
        return result

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._let_stop()
        self._let_speak()
        result: RunResult = super()._monitor_workers(worker_group)
        if not result.failures:
            return result
        if self.stop or any(failure.exitcode in {*FINAL, STOPPED} for failure in result.failures.values()):
            self._remaining_restarts = 0
        elif (reached := self._reached()) > self._furthest:
            # The limit grows with what is left of it, since ranks learn from both how often they were started.
            regained = self._budget - self._remaining_restarts
            worker_group.spec.max_restarts += regained
            self._remaining_restarts += regained
            self._furthest = reached
        return result

    def _reached(self) -> int:
        return -1 if self.progress is None else progress(self.progress)

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._pcontext.processes] if isinstance(self._pcontext, Ranks) else []

    def _let_stop(self) -> None:
        """Wait for ranks that are about to stop, since this agent or one of them was asked to."""
        while self._alive():
            codes = self._codes()
            if not self.stop and STOPPED not in codes:
                return
            now = time.monotonic()
            self._limit = self._limit or now + self.recovery.grace_s
            if any(code not in {None, 0, STOPPED} for code in codes):
                return  # a failure, of which the others may have to tell
            if now > self._limit:
                seconds = f"recovery.grace_s={self.recovery.grace_s:g}"
                if now - self._asked_at >= self.recovery.grace_s:
                    print(f"error: ranks did not stop within {seconds} seconds, and are killed", file=sys.stderr)
                self._pcontext.close(signal.SIGTERM)  # type: ignore[union-attr]
                return
            time.sleep(0.05)

    def _let_speak(self) -> None:
        """Wait a little for the others if a rank failed: torch ends them as soon as it sees it.

        Not if it ended for good, for its own words say all, and the others would only tell what they met in its wake.
        """
        limit = time.monotonic() + LAST_WORDS_S
        while any(codes := self._codes()) and time.monotonic() < limit:
            if None not in codes or FINAL.intersection(codes):
                return
            time.sleep(0.05)

    def _let_end(self) -> None:
        """Wait a little for ranks that end by themselves, and as long as it takes for those that stop."""
        limit = time.monotonic() + LAST_WORDS_S
        while self._alive() and time.monotonic() < limit:
            self._let_stop()
            time.sleep(0.05)


def is_news(record: logging.LogRecord) -> bool:
    """Hide that a rank "failed" by a stop: torch's agent knows no other end than 0 and a failure."""
    stops = {STOPPED, -Agent.stop, -signal.SIGTERM} if Agent.stop else {STOPPED}
    is_end = str(record.msg).startswith("failed (exitcode")
    return not (is_end and isinstance(record.args, tuple) and record.args[0] in stops)


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this node under torch's elastic agent and return the exit code."""
    logging.getLogger(multiprocessing.api.__name__).addFilter(is_news)
    options = run.parse_args(argv)
    # torch has no options for them.
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    multiprocessing.SubprocessContext = Ranks  # type: ignore[misc]
    _configure(options)
    if options.standalone and (reason := unreachable()):  # torch's agent would wait there without a word
        print(f"error: {reason}", file=sys.stderr)
        return BackendError.exit_code
    limit = 0.0
    try:
        while True:
            starts = Agent.starts
            code = _run(options)
            if code is not None:
                return code
            if Agent.starts > starts:
                limit = time.monotonic() + Agent.meeting.patience_s
            if not Agent.meeting.await_store(limit):
                print(f"error: the agent at {Agent.meeting} did not come back in time", file=sys.stderr)
                return LOST
    except SignalException:
        return STOPPED
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # else Python would let it end the process at its end


def _run(options: Namespace) -> int | None:
    """Have an agent run the ranks until they end for good; None: the one that holds the store is lost."""
    try:
        run.run(options)
    except ChildFailedError as error:
        codes = [failure.exitcode for _, failure in sorted(error.failures.items())]
        if Agent.stop and {*codes} <= {STOPPED, -Agent.stop, -signal.SIGTERM}:  # that is, before a rank could note it
            return STOPPED
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # with which the agent ends the others
                print(f"error: rank {rank}: ended by {failure.signal_name()}", file=sys.stderr)
        return blame(codes)
    except (RendezvousError, DistError, OSError) as error:
        if Agent.stop:
            return STOPPED
        if not Agent.starts or isinstance(error, OSError):
            print(f"error: {unmet(options.rdzv_endpoint or options.master_addr, error)}", file=sys.stderr)
            return BackendError.exit_code
        if isinstance(error, RendezvousClosedError):
            print("error: the agent of another machine has ended, and says why; this one ends, too", file=sys.stderr)
            return LOST
        if isinstance(error, RendezvousTimeoutError):
            seconds = f"{Agent.meeting.patience_s:g} seconds"
            print(f"error: agents of other machines are gone, and did not come back in {seconds}", file=sys.stderr)
            return LOST
        print(
            f"the agent at {Agent.meeting} is gone ({reasons(error)}); waiting for it to be started again, for up to "
            f"{Agent.meeting.patience_s:g} seconds",
            file=sys.stderr,
        )
        return None
    return 0


def _configure(options: Namespace) -> None:
    """Learn from the run's configuration what the agent needs of it; what is no run of ours has the defaults."""
    if options.rdzv_backend == "c10d" and not options.standalone:
        host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=PORT)
        patience_s = _parse_rendezvous_config(options.rdzv_conf).get("join_timeout", Meeting.patience_s)
        Agent.meeting = Meeting(host, port, float(patience_s))
    arguments = options.training_script_args
    if not (options.module and options.training_script == "nxtrain" and arguments[:1] == ["train"]):
        return
    with suppress(ConfigError):  # which the ranks will tell
        config = load(Path(arguments[1]), arguments[2:]).config
        Agent.recovery, Agent.progress = config.recovery, config.run.dir / LOGS_DIR / PROGRESS_FILE


def blame(exit_codes: Sequence[int]) -> int:
    """The exit code that tells most: one of ours, else a crash, else a signal as a shell counts it.

    Ranks that lose a peer crash (1) or are killed (negative) at nearly the same moment as the one that knows why. One
    that stopped when it was asked to tells least.
    """
    known = [code for code in exit_codes if code > 1 and code != STOPPED]
    crashed = [code for code in exit_codes if code > 0 and code != STOPPED]
    killed = [128 - code for code in exit_codes if code < 0]
    return (known or crashed or killed or list(exit_codes))[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
