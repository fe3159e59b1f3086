"""Elastic agent of nxtrain: torchrun that exits with the failed rank's exit code, where torchrun always exits with 1.

The agent restarts ranks like torchrun, but not after errors that every start would repeat, such as an invalid
configuration or a graph that was not compiled. The count of `--max-restarts` is reset once a run gets further than
before. After a rank fails, the others get time to report the cause before they are killed. A stop signal is sent to all
ranks, which get time to save and exit with 75, like the agent. On several machines, an agent that has lost the agent
with the store waits for its restart, and the run continues.

This module is a program, and the only module of this package that imports torch. It takes torchrun's options, as in
`python -m nxtrain.launch.torchrun --nproc-per-node=2 -m nxtrain train CONFIG`.
"""

from __future__ import annotations

# ruff: noqa: E402
# isort: off
# Before torch, whose import takes seconds, in which a request for stacks would end the process.
from nxtrain.common.process import garbage, stacks

stacks.answer_requests()
if __name__ == "__main__":
    garbage.collect_rarely()
# isort: on

import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from types import FrameType
from typing import Any

from torch.distributed import DistError, TCPStore, run
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.elastic.rendezvous import utils
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher import api

from nxtrain.common.distributed.failures import FirstFailure
from nxtrain.common.distributed.rendezvous import store_of_start
from nxtrain.common.distributed.replacement import LOOK_S, REPORT_S, RESTARTS, Replacement
from nxtrain.common.errors import BackendError, ConfigError, StoppedBySignal
from nxtrain.common.mesh import spans
from nxtrain.common.process.signals import STOPPING
from nxtrain.common.run_folder import LOGS_DIR
from nxtrain.config.load import load
from nxtrain.config.operation_schema import RecoveryConfig
from nxtrain.launch.agent_rendezvous import AgentRendezvous, failed_rendezvous, reasons, unreachable
from nxtrain.launch.exit_codes import FINAL
from nxtrain.metrics.start_log import last_step

STOPPED = StoppedBySignal.exit_code

LOST = 1
"""Exit code of an agent that lost the other agents permanently; as after a crash, a restart may help."""

PORT = 29400
"""Default port of torchrun's rendezvous endpoints."""

NOTICE_S = 1.0
"""Seconds in which ranks notice the loss of a rank by themselves, if their host waits for that rank."""

REPORT_WAIT_S = 5.0
"""Seconds that the other ranks get after the failure of a rank, to report the lost rank and to exit."""

ENDING_S = 1.0
"""Seconds from SIGTERM to SIGKILL for ranks of a failed start; saved state is valid at any time of the kill."""

REPEAT_S = 1.0
"""Seconds within which a second stop signal counts as the same request."""

IGNORED = [number for number in STOPPING if signal.getsignal(number) is signal.SIG_IGN]
"""Stop signals that the parent process ignores, as with `nohup`; ranks also ignore them."""


class RankProcesses(SubprocessContext):
    """Rank processes of this node; after a failure they are killed sooner than after torch's 30 seconds."""

    @property
    def processes(self) -> list[Popen[bytes]]:
        """Processes of all ranks on this node."""
        return [handler.proc for handler in self.subprocess_handlers.values()]

    @property
    def alive(self) -> list[Popen[bytes]]:
        """Rank processes that are still running."""
        return [process for process in self.processes if process.poll() is None]

    def _start(self) -> None:
        self._ignore()
        super()._start()

    def replace(self, ranks: Collection[int], start: int) -> None:
        """Replace the processes of lost ranks by new processes of a start; other ranks keep their processes."""
        self._ignore()
        for rank in ranks:
            self.envs[rank][RESTARTS] = str(start)
            self.subprocess_handlers[rank] = get_subprocess_handler(
                self.entrypoint,  # type: ignore[arg-type]  # a path, as in torch's own call
                self.args[rank],
                self.envs[rank],
                self.stdouts[rank],
                self.stderrs[rank],
                rank,
                self._numa_options,
            )

    @staticmethod
    def _ignore() -> None:
        # Ranks inherit SIG_IGN; for SIGUSR2 until they handle requests for stacks. torch has its own handlers here.
        for number in (*IGNORED, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)

    def _close(self, death_sig: signal.Signals, timeout: float = ENDING_S) -> None:
        # After a final error of one rank, the other ranks could only report its consequences.
        numbers = [signal.SIGTERM, signal.SIGKILL]
        if FINAL.intersection(process.poll() for process in self.processes):
            numbers = [signal.SIGKILL]
        for number in numbers:
            for process in self.alive:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            limit = time.monotonic() + ENDING_S
            for process in self.processes:
                with suppress(TimeoutExpired):
                    process.wait(max(0.0, limit - time.monotonic()))


class Agent(LocalElasticAgent):
    """Elastic agent that restarts ranks except after a final error, and lets ranks save after a stop signal.

    Attributes:
        recovery: Recovery settings, set before the agent is created.
        logs: Folder with the log of the run's starts; None without a log.
        meeting: Rendezvous with the agents of other machines.
        stop: Number of the received stop signal; 0 for none.
        starts: Number of times that agents of this process have started ranks.
    """

    recovery = RecoveryConfig()
    logs: Path | None = None
    meeting = AgentRendezvous()
    stop = 0
    starts = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked_at = self._limit = 0.0
        self._budget = self._remaining_restarts
        self._furthest = self._reached()
        if self.starts:
            self._worker_group.spec.max_restarts += 1  # torch counts only restarts that a failed rank has caused
        self._listen()

    def _listen(self) -> None:
        for number in STOPPING:
            if number in IGNORED:
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(number, self._note)
        signal.signal(signal.SIGUSR2, lambda number, frame: self._send(number))

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal: request all ranks to stop; a second signal kills them soon."""
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
        if isinstance(self._pcontext, RankProcesses):
            return self._pcontext.alive
        return []

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torch's agents would reuse the store of the first start for all starts, with the keys of earlier ranks.
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, DynamicRendezvousHandler):
            handler._bootstrap_store_info = None
        with self.meeting.announce_wait():
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        Agent.starts += 1
        self._listen()  # torch has put its own handlers in place
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:  # another agent was started again, which torch does not count
            self._worker_group.spec.max_restarts += 1
        super()._restart_workers(worker_group)

    def _invoke_run(self, *args: Any, **kwargs: Any) -> RunResult:
        try:
            result: RunResult = super()._invoke_run(*args, **kwargs)
        except (RendezvousError, DistError):
            # The agent with the store is gone, perhaps because its ranks have stopped, as these ranks are about to.
            limit = time.monotonic() + REPORT_WAIT_S
            while self._alive() and time.monotonic() < limit:
                self._await_stop()  # up to the grace period
                time.sleep(0.05)
            codes = self._codes()
            if not codes or any(code not in {0, STOPPED} for code in codes):
                raise
            result = super()._monitor_workers(self._worker_group)
        return result

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._await_stop()
        if self._replace(worker_group):
            return RunResult(WorkerState.HEALTHY)
        self._wait_for_reports()
        result: RunResult = super()._monitor_workers(worker_group)
        if not result.failures:
            return result
        if self.stop or any(failure.exitcode in {*FINAL, STOPPED} for failure in result.failures.values()):
            self._remaining_restarts = 0
            return result
        self._reset_restarts(worker_group)
        return result

    def _replace(self, worker_group: WorkerGroup) -> bool:
        """Replace lost ranks by new processes while survivors keep theirs (`recovery.in_job`).

        Survivors must first report that they have left their process groups.

        Returns:
            True if the ranks are replaced; False if torch's agent must handle the failure.
        """
        processes, is_wanted = self._pcontext, self.recovery.in_job and not self.meeting.host
        if not (is_wanted and isinstance(processes, RankProcesses) and any(self._codes())):
            return False
        start = worker_group.spec.max_restarts - self._remaining_restarts
        limit = time.monotonic() + REPORT_S
        host, port = str(worker_group.master_addr), int(str(worker_group.master_port))
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=REPORT_S))
        replacement, failure = Replacement(store, start), FirstFailure(store_of_start(store, start))
        tell_at = time.monotonic() + NOTICE_S
        while True:
            codes = self._codes()
            living = [rank for rank, code in enumerate(codes) if code is None]
            is_final = bool(self.stop) or not FINAL.union({0, STOPPED}).isdisjoint(codes)
            is_final = is_final or not living or not self._remaining_restarts or replacement.is_refused()
            if is_final or time.monotonic() > limit:
                return False
            if replacement.have_reported(living):
                break
            if time.monotonic() > tell_at:  # a GPU waits for a lost rank without an error
                failure.publish(f"lost ranks: {spans([rank for rank, code in enumerate(codes) if code])}")
                tell_at = limit
            time.sleep(LOOK_S)
        self._reset_restarts(worker_group)
        self._remaining_restarts -= 1
        lost = [rank for rank, code in enumerate(codes) if code is not None]
        processes.replace(lost, start + 1)
        self._listen()
        for worker in worker_group.workers:
            worker.id = processes.pids()[worker.local_rank]
        replacement.announce()
        print(f"lost ranks {spans(lost)} are replaced; ranks {spans(living)} keep their processes", file=sys.stderr)
        return True

    def _reset_restarts(self, worker_group: WorkerGroup) -> None:
        """Reset the count of restarts if the run got further than at the last failure."""
        reached = self._reached()
        if reached > self._furthest:
            # The limit grows together with the remaining restarts, since ranks derive their restart count from both.
            regained = self._budget - self._remaining_restarts
            worker_group.spec.max_restarts += regained
            self._remaining_restarts += regained
            self._furthest = reached

    def _reached(self) -> int:
        if self.logs is None:
            return -1
        return last_step(self.logs)

    def _codes(self) -> list[int | None]:
        if isinstance(self._pcontext, RankProcesses):
            return [process.poll() for process in self._pcontext.processes]
        return []

    def _await_stop(self) -> None:
        """Wait until all ranks stop after a stop signal to this agent or a rank; kill them after the grace period."""
        while self._alive():
            codes = self._codes()
            if not self.stop and STOPPED not in codes:
                return
            now = time.monotonic()
            self._limit = self._limit or now + self.recovery.grace_s
            if any(code not in {None, 0, STOPPED} for code in codes):
                return  # a failure, whose cause the other ranks may report
            if now > self._limit:
                seconds = f"recovery.grace_s={self.recovery.grace_s:g}"
                if now - self._asked_at >= self.recovery.grace_s:
                    print(f"error: ranks did not stop within {seconds} seconds, and are killed", file=sys.stderr)
                self._pcontext.close(signal.SIGTERM)  # type: ignore[union-attr]
                return
            time.sleep(0.05)

    def _wait_for_reports(self) -> None:
        """Wait after a failure until the other ranks have reported, since torch kills them as soon as one fails.

        After a final error there is no wait, since the other ranks only report consequences.
        """
        limit = time.monotonic() + REPORT_WAIT_S
        while time.monotonic() < limit:
            codes = self._codes()
            if not any(codes) or None not in codes or FINAL.intersection(codes):
                return
            time.sleep(0.05)


def is_news(record: logging.LogRecord) -> bool:
    """Log filter: False for records of torch's agent about ranks that ended by a requested stop, not by a failure."""
    stops = {STOPPED}
    if Agent.stop:
        stops = {STOPPED, -Agent.stop, -signal.SIGTERM}
    is_end = str(record.msg).startswith("failed (exitcode")
    return not (is_end and isinstance(record.args, tuple) and record.args[0] in stops)


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this node under the elastic agent; return the exit code."""
    garbage.settle()
    logging.getLogger(multiprocessing.api.__name__).addFilter(is_news)
    options = run.parse_args(argv)
    # torch has no options for these classes.
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    multiprocessing.SubprocessContext = RankProcesses  # type: ignore[misc]
    _configure(options)
    if options.standalone:
        reason = unreachable()
        if reason:  # torch's agent would wait there without a message
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
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # else SIGUSR2 could kill the process while Python shuts down


def _run(options: Namespace) -> int | None:
    """Run the ranks under an agent; return the exit code, or None if the agent with the store is lost."""
    try:
        run.run(options)
    except ChildFailedError as error:
        codes = [failure.exitcode for _, failure in sorted(error.failures.items())]
        if Agent.stop and {*codes} <= {STOPPED, -Agent.stop, -signal.SIGTERM}:  # that is, before a rank could note it
            return STOPPED
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # with which the agent ends the others
                print(f"error: rank {rank}: ended by {failure.signal_name()}", file=sys.stderr)
        return exit_code_of(codes)
    except (RendezvousError, DistError, OSError) as error:
        if Agent.stop:
            return STOPPED
        if not Agent.starts or isinstance(error, OSError):
            print(f"error: {failed_rendezvous(options.rdzv_endpoint or options.master_addr, error)}", file=sys.stderr)
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
    """Read the agent's settings from the run's configuration; programs other than nxtrain get the defaults."""
    if options.rdzv_backend == "c10d" and not options.standalone:
        host, port = utils.parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=PORT)
        conf = utils._parse_rendezvous_config(options.rdzv_conf)
        Agent.meeting = AgentRendezvous(host, port, float(conf.get("join_timeout", AgentRendezvous.patience_s)))
        if conf.get("is_host", str(utils._matches_machine_hostname(host))).lower() in {"false", "0"}:
            Agent.meeting.await_host()
    arguments = options.training_script_args
    if not (options.module and options.training_script == "nxtrain" and arguments[:1] == ["train"]):
        return
    with suppress(ConfigError):  # the ranks report it
        config = load(Path(arguments[1]), arguments[2:]).config
        Agent.recovery, Agent.logs = config.recovery, config.run.dir / LOGS_DIR


def exit_code_of(exit_codes: Sequence[int]) -> int:
    """Choose the most informative exit code of all ranks: nxtrain's own codes, then crashes, then signals.

    Ranks that lose a peer crash (1) or are killed (negative) at nearly the same time as the rank that knows the cause.
    The code of a requested stop is the least informative. A signal is returned as 128 plus its number.
    """
    own_codes = [code for code in exit_codes if code > 1 and code != STOPPED]
    crashed = [code for code in exit_codes if code > 0 and code != STOPPED]
    killed = [128 - code for code in exit_codes if code < 0]
    return (own_codes or crashed or killed or list(exit_codes))[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
