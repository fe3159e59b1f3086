"""The watchdog survives a closed screen, a slow store, and a disk that does not answer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from nxtrain.backends.base import Backend
from nxtrain.backends.diagnostics import Diagnostics
from nxtrain.common.distributed.heartbeats import HeartbeatStore
from nxtrain.common.errors import HangError, LostPeerError
from nxtrain.common.process import stacks
from nxtrain.common.process.deadlines import SingleTask
from nxtrain.common.process.signals import Signals
from nxtrain.common.process.stacks import print_line
from nxtrain.common.run_folder import LOGS_DIR, STARTS_FILE
from nxtrain.metrics.goodput_meter import GoodputMeter
from nxtrain.metrics.run_observer import Outcome, RunObserver
from nxtrain.metrics.start_log import StepFile, last_step, read
from nxtrain.train.health.recompiles import WARM_UP
from nxtrain.train.supervision import watchdog as watchdogs
from nxtrain.train.supervision.coordinated_stop import GIVE_UP_S
from nxtrain.train.supervision.preflight import refuse_crash_loop
from nxtrain.train.supervision.watchdog import Watchdog


class SlowStore:
    """A board whose store does not answer some questions in time."""

    def __init__(self, failures: int) -> None:
        self.failures, self.said = failures, list[str]()

    def again(self) -> SlowStore:
        return self

    def _answer(self, what: str) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("timed out")
        self.said.append(what)

    def ask_stop(self, why: str) -> None:
        self._answer(why)

    def calls(self) -> bool:
        return True

    def stop_asked(self) -> str:
        return self.said[0]

    def publish_begun(self, step: int) -> None:
        self._answer(f"begun {step}")

    def stop_step(self) -> int:
        return 4

    def failure(self) -> str:
        return "rank 0 failed: DataError: no rows"

    def declare_hang(self) -> bool:
        raise RuntimeError("gone")


def watch(
    folder: Path,
    board: SlowStore | None = None,
    limit_s: float = 3.0,
    *,
    compiles: bool = False,
    asynchronous: bool = False,
    abandon: Callable[[str], None] | None = None,
) -> Watchdog:
    backend = SimpleNamespace(
        abandon=abandon,
        rank=1 if board else 0,
        world=2 if board else 1,
        compiles_at_first_use=compiles,
        extracts=False,
        is_asynchronous=asynchronous,
        diagnostics=Diagnostics(),
        heartbeat_store=lambda: cast("HeartbeatStore | None", board),
    )
    keeps_state = abandon is not None
    return Watchdog(cast("Backend", backend), limit_s, folder / LOGS_DIR, Signals(), keeps_state=keeps_state)


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize("compiles", [False, True])
def test_new_work_has_longer_where_it_compiles_at_first_use(tmp_path: Path, compiles: bool) -> None:
    watchdog = watch(tmp_path, limit_s=10.0, compiles=compiles)
    assert watchdog._limit() == (40.0 if compiles else 10.0)  # the start
    limits = []
    for step in range(1, WARM_UP + 2):
        watchdog.enter(step, "training")
        limits.append(watchdog._limit())
    assert limits == [*[40.0 if compiles else 10.0] * WARM_UP, 10.0]


def test_a_screen_that_is_gone_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(descriptor: int, data: bytes) -> int:
        raise BrokenPipeError

    ended: list[int] = []
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "_exit", ended.append)
    print_line("a line")
    signals = Signals()
    signals.note(15)
    signals._asked_at -= 2
    signals.note(10)
    assert ended == [128 + 10]


@pytest.mark.parametrize("failures", range(4))
def test_a_store_that_was_slow_is_asked_again(tmp_path: Path, failures: int) -> None:
    board = SlowStore(failures)
    watchdog = watch(tmp_path, board)
    watchdog.gate.resume(4)
    watchdog._signals.asked = "SIGTERM"
    for _ in range(failures + 2):
        watchdog._stop.poll(due=True)
        watchdog._link.reach()
        until(lambda: watchdog._link.store is not None)
    assert board.said == ["SIGTERM at rank 1", "begun 4"]
    assert watchdog.gate.stops(4)


def test_without_the_store_no_rank_of_many_decides_alone(tmp_path: Path) -> None:
    watchdog = watch(tmp_path, SlowStore(0))
    link = watchdog._link
    link._lost, link.store, link._lost_at = link.store, None, time.monotonic()
    watchdog._signals.asked = "SIGTERM"
    watchdog._stop.poll(due=True)
    assert not watchdog.gate.stops(1), "it may come back"
    link._lost_at -= GIVE_UP_S
    watchdog._stop.poll(due=True)
    with pytest.raises(LostPeerError, match="does not answer"):
        watchdog.gate.stops(2)


def test_a_run_that_is_killed_after_it_was_asked_to_stop_has_not_failed(tmp_path: Path) -> None:
    for _ in range(3):  # each killed in its first step
        meter, watchdog = GoodputMeter(tmp_path / LOGS_DIR), watch(tmp_path)
        refuse_crash_loop(tmp_path / LOGS_DIR, "", 2)
        meter.begin(0)
        watchdog.report_to(meter)
        watchdog._signals.asked = "SIGTERM"
        watchdog._stop.poll(due=True)
        with watchdog._stop._on_stop_task._busy:  # the note is written
            pass


def test_a_stop_that_was_requested_before_the_first_step_is_recorded_too(tmp_path: Path) -> None:
    meter, watchdog = GoodputMeter(tmp_path / LOGS_DIR), watch(tmp_path)
    watchdog._signals.asked = "SIGTERM"
    watchdog._stop.poll(due=True)
    meter.begin(0)
    watchdog.report_to(meter)
    assert read(tmp_path / LOGS_DIR)[-1].stop == "SIGTERM"


def test_a_disk_that_does_not_answer_hides_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never, ended, said = threading.Event(), list[int](), list[str]()
    monkeypatch.setattr(watchdogs, "FILES_S", 0.05)
    monkeypatch.setattr(watchdogs, "print_line", said.append)
    watchdog = watch(tmp_path, limit_s=0.1)

    def end_process(code: int) -> None:
        ended.append(code)
        watchdog._ended.set()

    monkeypatch.setattr(os, "_exit", end_process)

    class DeadDisk(RunObserver):
        def beat(self) -> None:
            never.wait(10)

        def end(self, outcome: Outcome, why: str) -> None:
            never.wait(10)

    watchdog._dump = lambda: never.wait(10)  # type: ignore[method-assign,assignment]
    watchdog.report_to(DeadDisk())
    with watchdog:
        until(lambda: bool(ended))
    never.set()
    assert ended == [HangError.exit_code]
    assert "did not get on within recovery.hang_timeout_s=0.1 seconds" in said[-1]


def test_any_end_ends_the_watch(tmp_path: Path) -> None:
    watchdog = watch(tmp_path)
    with pytest.raises(SystemExit), watchdog:
        raise SystemExit(1)
    assert not watchdog._thread.is_alive()


@pytest.mark.parametrize("case", ["waits", "computes", "reports", "synchronous"])
def test_a_rank_whose_device_waits_for_a_failed_one_says_so_and_ends(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(stacks, "end_in", lambda seconds: None)
    monkeypatch.setattr(watchdogs, "waits", lambda frame: case != "computes")
    monkeypatch.setattr(watchdogs, "REPORT_S", 60.0 if case == "reports" else 0.0)
    watchdog = watch(tmp_path, SlowStore(0), asynchronous=case != "synchronous")
    watchdog._check_failure()
    assert ended == ([LostPeerError.exit_code] if case == "waits" else [])
    said = "error: rank 1: rank 0 failed: DataError: no rows\nrank 1 needs it, and ends too"
    assert (said in capfd.readouterr().err) == bool(ended)


def test_a_rank_that_keeps_its_state_ends_the_waits_of_its_device_alone_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned: list[str] = []
    monkeypatch.setattr(watchdogs, "FAILURE_S", 0.0)
    watchdog = watch(tmp_path, SlowStore(0), asynchronous=True, abandon=abandoned.append)
    for _ in range(3):
        watchdog._check_failure()
    assert abandoned == ["rank 0 failed: DataError: no rows"]


def test_one_call_at_a_time_is_under_way() -> None:
    aside, begun, runs, free = SingleTask(), list[int](), threading.Event(), threading.Event()

    def work() -> None:
        begun.append(1)
        runs.set()
        free.wait(10)

    for _ in range(3):
        aside.start(work)
    assert runs.wait(10)
    assert begun == [1]
    free.set()


def test_a_watch_that_fails_says_so_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No thread can be started for a while; a hang is found all the same, and a run that gets on lives."""
    ended: list[int] = []

    def refuse(self: SingleTask, work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    watchdog = watch(tmp_path, limit_s=1.5)

    def end_process(code: int) -> None:
        ended.append(code)
        watchdog._ended.set()

    monkeypatch.setattr(watchdogs, "TICK_S", 0.02)
    monkeypatch.setattr(SingleTask, "start", refuse)
    monkeypatch.setattr(watchdogs, "call_with_timeout", lambda seconds, work: refuse(watchdog._ticking, work))
    monkeypatch.setattr(os, "_exit", end_process)
    with watchdog:
        for step in range(100):  # longer than a timer would leave it that nobody puts off
            watchdog.enter(step, "training")
            time.sleep(0.03)
        assert not ended
        until(lambda: bool(ended))
    assert ended == [HangError.exit_code]
    said = capfd.readouterr().err
    assert said.count("a part of its watch failed, and is tried again: RuntimeError: can't start new thread") == 1
    assert "the run hangs; the watch fails too" in said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_ends_by_itself_ends_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dismissed: list[bool] = []
    watchdog = watch(tmp_path)
    dismiss = stacks.dismiss

    def note() -> None:
        dismissed.append(True)
        dismiss()

    monkeypatch.setattr(stacks, "dismiss", note)

    def fail() -> float:
        raise KeyboardInterrupt

    watchdog._pause = fail  # type: ignore[method-assign]
    watchdog._thread.start()
    watchdog._thread.join(10)
    assert dismissed == [True]


def test_the_rank_of_another_disk_writes_its_last_step_there(tmp_path: Path) -> None:
    """The launcher of the disk's node counts restarts by this file."""
    logs, file = tmp_path / LOGS_DIR, StepFile(tmp_path / LOGS_DIR)
    file.begin(3)
    assert last_step(logs) == 3
    file.finish(5)
    file.beat()
    assert last_step(logs) == 3, "a beat within a second of the last writes nothing"
    file._next_s = 0.0
    file.beat()
    assert last_step(logs) == 5
    file.finish(6)
    file.end("done", "")
    assert last_step(logs) == 6
    assert not (logs / STARTS_FILE).exists()
    assert read(logs) == []
