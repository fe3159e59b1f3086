"""Python programs that start each other, as forks of a process that has imported everything.

Their processes are real, with parents, sessions, signals, pipes and exit codes of their own. A fork stands for the
start of Python and the imports, a program that goes on within the process for `execve`. Tests of what a start or an
import does start Python itself.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PROGRAMS = {"neuron_parallel_compile": "tests.support.parallel_compile"}
"""Modules of the programs that a shell script starts, by the script's name."""

AGENT = "nxtrain.launch.torchrun"
"""Module of the program that starts ranks."""

FIRST = "NXTRAIN_TEST_FIRST"
"""Variable with a function that each program calls first, as MODULE:FUNCTION."""

_START = _posixsubprocess.fork_exec


class _Executed(BaseException):
    """Program that `execve` puts in the place of a process's own."""

    def __init__(self, program: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__()
        self.argv, self.env = [*map(str, argv)], dict(env)


def play(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Be `python -m MODULE ARGUMENTS` in this process until its end; what it starts are forks of it."""
    for module in (_posixsubprocess, subprocess):
        for name in {"fork_exec", "_fork_exec"} & set(vars(module)):  # the latter since Python 3.11
            setattr(module, name, _fork)
    os.execve = _execute  # type: ignore[assignment]
    while True:
        try:
            code = _run(argv, env)
        except _Executed as next_:
            argv, env = next_.argv, next_.env
            _forget()
        else:
            os._exit(code)  # threads of runtimes do not join


def command() -> NoReturn:
    """Be the command `nxtrain` with the arguments and variables of this process."""
    play([sys.executable, "-m", "nxtrain", *sys.argv[1:]], dict(os.environ))


def agent() -> NoReturn:
    """Be an agent of nxtrain with the arguments and variables of this process."""
    play([sys.executable, "-m", AGENT, *sys.argv[1:]], dict(os.environ))


def _execute(*program: Any) -> NoReturn:
    raise _Executed(*program)


def _module_of(argv: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """Module that a command line lets Python run, and its arguments; None: no such command line."""
    first, *words = argv[2:] if argv[0] == "env" else argv
    if name := PROGRAMS.get(Path(first).name):
        return name, words
    words = words[1:] if words[:1] == ["-u"] else words
    return (words[1], words[2:]) if first == sys.executable and words[:1] == ["-m"] else None


def _fork(*start: Any) -> int:
    """`fork_exec` of Python's subprocesses, whose arguments begin alike in all releases."""
    argv, _, _, _, cwd, env, stdin, _, _, stdout, _, stderr, *_ = start
    words, variables = [*map(os.fsdecode, argv)], env
    if _module_of(words) is None:
        return int(_START(*start))
    if env is None:
        variables = [b"%b=%b" % pair for pair in os.environb.items()]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if process := os.fork():
        return process
    try:
        for file, number in ((stdin, 0), (stdout, 1), (stderr, 2)):
            if file >= 0:
                os.dup2(file, number)
        os.closerange(3, 1024)
        if start[15]:
            os.setsid()
        if cwd is not None:
            os.chdir(cwd)
        _forget()
        play(words, dict(os.fsdecode(line).split("=", 1) for line in variables))
    finally:
        os._exit(1)  # whatever happens, the calls of the starting program are not this one's to go on with


def _forget() -> None:
    """Leave behind what a new program has not: the signal handlers, exit functions and garbage of another."""
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # which a program inherits
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    gc.freeze()


def _run(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a program and return its exit code."""
    result = _module_of(argv)
    assert result is not None, argv
    name, words = result
    if argv[0] == "env":
        os.chdir(argv[1].removeprefix("--chdir="))
    _adopt(env)
    if FIRST in env:
        module, _, function = env[FIRST].partition(":")
        getattr(importlib.import_module(module), function)()
    sys.orig_argv, sys.argv = [*argv], [name, *words]
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(at, mode, 1, closefd=False) for at, mode in enumerate("rww"))
    sys.modules.pop(name if "." in name else f"{name}.__main__", None)  # a program begins with its module afresh
    if name == AGENT:
        _name_events_by_frames()
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        code: Any = 0
    except _Executed:
        raise
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code or 0


def _name_events_by_frames() -> None:
    """Let torch's agent name its events without `inspect.stack`.

    `inspect.stack` looks at every module of the process, and lazy ones load in answer. An agent of its own Python has
    few modules; a fork has all of the tests' modules, and would spend ten seconds of a core.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def _adopt(env: Mapping[str, str]) -> None:
    if "torch_xla" in sys.modules:
        from tests.support.xla_processes import adopt

        adopt(env)
    else:
        os.environ.clear()
        os.environ.update(env)
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    importlib.invalidate_caches()
