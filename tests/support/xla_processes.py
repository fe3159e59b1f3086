"""Processes with XLA:CPU devices, forked from one that has imported everything and made no device yet.

To import torch, torch-xla and the product takes five seconds of a core, a fork a few hundredths. torch-xla reads its
variables when a process makes its first device, so that each fork has its own devices, flags and pools.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.forked_python import play

FAST = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)
"""Flags that compile in a seventh of the time: XLA's own passes run, LLVM's do not, fusions skip MLIR, and a graph is
one module of LLVM."""

OPTIMIZED = ""
"""The flags of a user: what XLA:CPU computes by default."""


def context() -> ForkServerContext:
    """Starts processes that have imported everything; a process that asks for one has no forkserver of another kind."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.support.xla_preload"])
    return found


class Ended(NamedTuple):
    """A process that has ended.

    Args:
        code: Its exit code; negative: the signal that killed the process.
        printed: Standard output and error.
    """

    code: int
    printed: str


class Started(NamedTuple):
    """A process that may be under way.

    Args:
        process: As multiprocessing knows the process.
        log: File for what the process prints.
    """

    process: ForkServerProcess
    log: Path

    def ended(self, within_s: float) -> Ended:
        """Wait for the end.

        Raises:
            AssertionError: It does not come in time.
        """
        self.process.join(within_s)
        is_late = self.process.is_alive()
        if is_late:
            self.process.kill()
            self.process.join()
        printed = self.log.read_text(encoding="utf-8", errors="replace")
        assert not is_late, f"not done in {within_s:g} s:\n{printed[-6000:]}"
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, printed)


def start(target: Callable[..., object], *args: Any, env: Mapping[str, str], log: Path) -> Started:
    """Call a function in a process of its own.

    Args:
        target: Importable by name, like what it is given; small, since a pipe carries them.
        args: Its arguments.
        env: All variables of the process.
        log: File for what the process prints.
    """
    log.write_bytes(b"")
    process = context().Process(target=_begin, args=(log, dict(env), target, args))
    process.start()
    return Started(process, log)


def nxtrain(*argv: object, env: Mapping[str, str], log: Path) -> Started:
    """Start a command of nxtrain; each argument is written as on a shell's line."""
    return start(play, [sys.executable, "-m", "nxtrain", *map(str, argv)], dict(env), env=env, log=log)


def adopt(env: Mapping[str, str]) -> None:
    """Give this process the variables of another, with those that torch-xla adds when it is imported."""
    import torch_xla

    os.environ.clear()
    os.environ.update(env)
    torch_xla._setup_default_env()
    torch_xla._setup_xla_flags()


def _begin(log: Path, env: Mapping[str, str], target: Callable[..., object], args: tuple[Any, ...]) -> None:
    printed = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    adopt(env)
    target(*args)
