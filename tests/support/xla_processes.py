"""Processes with XLA:CPU devices, forked from one that has imported everything and made no device yet.

To import torch, torch-xla and the product takes five seconds of a core, a fork a few hundredths. torch-xla reads its
variables when a process makes its first device, so that each fork has its own devices, flags and pools.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Flags that compile in a third of the time; XLA's own passes run all the same, and LLVM's do not."""

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


def run(target: Callable[..., object], *args: Any, env: Mapping[str, str], log: Path, within_s: float) -> Ended:
    """Call a function in a process of its own, to its end.

    Args:
        target: Importable by name, like what it is given; small, since a pipe carries them.
        args: Its arguments.
        env: All variables of the process.
        log: File for what the process prints.
        within_s: Seconds.

    Raises:
        AssertionError: It takes longer.
    """
    process = context().Process(target=_begin, args=(log, dict(env), target, args))
    process.start()
    process.join(within_s)
    is_late = process.is_alive()
    if is_late:
        process.kill()
        process.join()
    printed = log.read_text(encoding="utf-8", errors="replace")
    assert not is_late, f"not done in {within_s:g} s:\n{printed[-6000:]}"
    assert process.exitcode is not None
    return Ended(process.exitcode, printed)


def _begin(log: Path, env: Mapping[str, str], target: Callable[..., object], args: tuple[Any, ...]) -> None:
    printed = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    adopt(env)
    target(*args)


def adopt(env: Mapping[str, str]) -> None:
    """Give this process the variables of another, with those that torch-xla adds when it is imported."""
    import torch_xla

    os.environ.clear()
    os.environ.update(env)
    torch_xla._setup_default_env()
    torch_xla._setup_xla_flags()
