"""Progress of long work on terminals and in logs: its lines, its times, and silence about short work."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nxtrain.common.process.console import PipeSafeConsole
from nxtrain.common.process.progress import Progress
from nxtrain.common.text import duration


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def log() -> PipeSafeConsole:
    return PipeSafeConsole(file=io.StringIO(), width=200)


def text(console: PipeSafeConsole) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize(("done", "spent_s"), [(1, 3.0), (25, 50.0), (50, 7.0), (99, 990.0), (200, 30.0)])
def test_a_line_has_the_share_and_the_time_that_is_left_at_the_speed_so_far(done: int, spent_s: float) -> None:
    clock = Clock()
    progress = Progress("reading", 100, console=log(), clock=clock)
    assert progress.line() == "reading: 0.0 s so far"
    clock.now_s += spent_s
    progress.show(done)
    share = min(done, 100) / 100
    left = duration(spent_s / share * (1 - share))
    assert progress.line() == f"reading: {share:.0%}, {duration(spent_s)} so far, about {left} left"
    progress.show(100, "writing")
    assert progress.line() == f"writing: 100%, {duration(spent_s)} so far, about 0.0 s left"


def test_work_of_unknown_amount_has_its_time_only() -> None:
    clock = Clock()
    progress = Progress("merging", console=log(), clock=clock)
    clock.now_s += 600
    assert progress.line() == "merging: 10.0 min so far"


def test_a_log_gets_lines_at_intervals_although_the_work_is_one_long_call() -> None:
    console = log()
    with Progress("merging", console=console, line_every_s=0.05):
        time.sleep(0.4)
    lines = text(console).splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"merging: [\d.]+ m?s so far", line) for line in lines)
    time.sleep(0.2)
    assert text(console).splitlines() == lines, "nothing is printed after the end"


def test_short_work_and_logs_of_work_for_terminals_only_stay_silent() -> None:
    console = log()
    with Progress("short", console=console):
        pass
    with Progress("long", console=console, on_terminals_only=True, line_every_s=0.01):
        time.sleep(0.1)
    assert text(console) == ""


def test_a_terminal_gets_one_line_that_is_gone_at_the_end() -> None:
    console = PipeSafeConsole(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False)
    with Progress("reading", 10, console=console, redraw_s=0.02) as progress:
        progress.show(5)
        time.sleep(0.2)
        console.print("a line of the work")
    raw = text(console)
    assert "reading: 50%" in raw
    assert "a line of the work\n" in raw
    assert raw.rstrip("\x1b[?25h").endswith("\x1b[2K"), "the live line is deleted"


def test_an_error_of_the_work_ends_the_lines_first() -> None:
    console = log()
    with pytest.raises(OSError, match="full"), Progress("writing", console=console, line_every_s=0.01):
        raise OSError("full")
    said = text(console)
    time.sleep(0.1)
    assert text(console) == said


def test_a_long_round_of_a_benchmark_says_how_long_it_takes(tmp_path: Path) -> None:
    code = (
        "from nxtrain.tools.bench import harness\n"
        "import nxtrain.common.process.progress as progress, time, functools\n"
        "def slow(): time.sleep(0.15)\n"
        "harness.Progress = functools.partial(progress.Progress, line_every_s=0.1)\n"
        "harness.take_turns({'ours': slow, 'theirs': slow}, 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    lines = done.stderr.splitlines()
    assert re.fullmatch(r"round \d of 2: (ours|theirs): \d+%, [\d.]+ m?s so far, about [\d.]+ m?s left", lines[-1]), (
        done.stderr
    )
    assert done.stdout == ""
