"""`nxtrain launch`, its agent and their ranks as forks of one process that has imported everything.

The launcher becomes the agent in the same process, as `execve` has it, and the agent forks its ranks, where torch's
`Popen` would start an interpreter. Signals, sessions, descriptors and exit codes are those of new programs.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import IO, Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

MOST_FILES = 4096

_leave = os._exit  # tests replace that of ranks


def fork_programs() -> None:
    """Make forks of all Python programs that this process becomes, or starts as an agent."""
    os.execve = _become  # type: ignore[assignment]
    SubprocessHandler._popen = _start  # type: ignore[assignment,method-assign]


def become_agent() -> None:
    """Run the agent of nxtrain in place of a command, with its arguments, and with forks as ranks."""
    fork_programs()
    _become("", [sys.executable, "-m", "nxtrain.launch.torchrun", *sys.argv[1:]], os.environ.copy())


def _become(path: str, argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Run `python -m MODULE WORDS` in this process to its end; `path` is that of its interpreter."""
    at = argv.index("-m") + 1
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [argv[at], *argv[at + 1 :]]
    runpy.run_module(argv[at], run_name="__main__", alter_sys=True)
    sys.exit()


def _start(handler: SubprocessHandler, argv: Sequence[str], environ: Mapping[str, str]) -> Forked:
    return Forked(argv, environ, handler._stdout, handler._stderr)


class Forked:
    """A Python program in a fork of this process, with the part of `Popen` that agents use.

    Args:
        argv: Python, its options, and the module with its arguments.
        environ: All of its environment.
        stdout: Takes its output; None: that of this process.
        stderr: The same for its errors.
    """

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], stdout: IO[Any] | None, stderr: IO[Any] | None
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            _run(argv, environ, stdout, stderr)

    def poll(self) -> int | None:
        """Exit code; None while the program runs."""
        if self.returncode is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code at the end of the program."""
        limit = time.monotonic() + timeout if timeout is not None else float("inf")
        while (code := self.poll()) is None:
            if time.monotonic() >= limit:
                raise TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(argv: Sequence[str], environ: Mapping[str, str], stdout: IO[Any] | None, stderr: IO[Any] | None) -> NoReturn:
    """Run a program in a fork, which then ends."""
    code: object = 1
    try:
        os.setsid()
        for number in signal.valid_signals():  # as execve does: what is ignored stays so, handlers are gone
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for descriptor, file in ((1, stdout), (2, stderr)):
            if file is not None:
                os.dup2(file.fileno(), descriptor)
        os.closerange(3, MOST_FILES)
        atexit._clear()
        torch.set_num_threads(1)
        try:
            _become("", argv, environ)
        except SystemExit as ended:
            code = ended.code
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        _leave(code if isinstance(code, int) else int(code is not None))
