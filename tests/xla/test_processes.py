"""Forks of the XLA lane have the devices, flags and variables that each was started with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from nxtrain.backends.base import Backend
from tests.support import starting
from tests.support.forked_python import play
from tests.support.processes import patient_s
from tests.support.xla_engine import run_devices, start_devices
from tests.support.xla_processes import start

VARIABLE = "NXTRAIN_TEST_OF_FORKS"


def rank_and_variable(backend: Backend) -> tuple[int, int, str]:
    """Rank, world, and a variable of the process."""
    return backend.rank, backend.world, os.environ.get(VARIABLE, "")


def test_each_fork_has_its_own_devices_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_devices(1, rank_and_variable, folder=tmp_path) == [(0, 1, "")]
    monkeypatch.setenv(VARIABLE, "set")  # the forkserver runs since before
    assert run_devices(3, rank_and_variable, folder=tmp_path) == [(rank, 3, "set") for rank in range(3)]
    monkeypatch.delenv(VARIABLE)
    assert run_devices(2, rank_and_variable, folder=tmp_path) == [(rank, 2, "") for rank in range(2)]


def test_flags_reach_the_compiler_of_a_fork(tmp_path: Path) -> None:
    """XLA parses its flags when a process makes its first device, and ends the process for one that it lacks."""
    done = start_devices(1, rank_and_variable, folder=tmp_path, flags="--xla_no_such_flag=1")
    assert done.code != 0
    assert "xla_no_such_flag" in done.printed


def play_with(ignored: bool, argv: list[str], env: dict[str, str]) -> NoReturn:
    """Play a program that ignores SIGINT, or has Python's handler."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    play(argv, env)


@pytest.mark.parametrize("ignored", [False, True])
def test_forked_programs_start_and_end_as_python_starts_and_ends_them(tmp_path: Path, ignored: bool) -> None:
    """Of each process: arguments, variables, streams, session, handled signals, and the exit code.

    Background jobs of a script ignore SIGINT, and what they start inherits that.
    """
    argv = [sys.executable, "-m", starting.__name__, "first", "an argument"]
    env = {**os.environ, VARIABLE: "set", "PJRT_DEVICE": "CPU"}  # else torch-xla tells of its choice
    real = subprocess.run(
        argv,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )
    forked = start(play_with, ignored, argv, env, env=env, log=tmp_path / "log.txt").ended(patient_s(60))
    assert (forked.code, forked.printed) == (real.returncode, real.stdout)
    assert real.returncode == starting.CODE
    assert real.stdout.count("session of its own") == 1, real.stdout
    assert real.stdout.count("SIGINT") == (0 if ignored else 5), real.stdout
