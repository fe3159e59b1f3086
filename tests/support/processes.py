"""Processes of tests: forks of one that has imported everything, each with a log, a rank, a port, and a limit."""

from __future__ import annotations

import functools
import multiprocessing
import os
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import typer.main

typer.main.get_command = functools.cache(typer.main.get_command)  # each call would build the parameters, in 60 ms


def build_commands() -> None:
    """Build the commands of nxtrain, which forks of this process then have."""
    from nxtrain.cli.main import app

    typer.main.get_command(app)


def is_alive(pid: int) -> bool:
    """True if a process runs; False for one that nobody has waited for since its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def context(*preload: str) -> ForkServerContext:
    """Starts forks of a process that has imported some modules; a test process has one such process."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([*preload])
    return server


PATIENCE = "NXTRAIN_TEST_PATIENCE"
"""Variable with the factor of all limits; 1 if it is not set."""


def patient_s(seconds: float) -> float:
    """A limit in seconds, times the factor of this test session."""
    return seconds * float(os.environ.get(PATIENCE) or 1)


class Ended(NamedTuple):
    """A process that has ended; its code is negative after a signal."""

    code: int
    printed: str


class Started(NamedTuple):
    """A process that may be under way."""

    process: ForkServerProcess
    log: Path

    def ended(self, within_s: float) -> Ended:
        """Wait for the end; a process that is late is killed, and fails the test."""
        self.process.join(within_s)
        is_late = self.process.is_alive()
        self.process.kill()
        self.process.join()
        printed = self.log.read_text(encoding="utf-8", errors="replace")
        assert not is_late, f"not done in {within_s:g} s:\n{printed[-6000:]}"
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, printed)


def prepared(started_by: ForkServerContext, log: Path, target: Callable[..., object], *args: Any) -> ForkServerProcess:
    """A process that will call a function, which is importable by name, and print into a log."""
    return started_by.Process(target=_begin, args=(log, target, args))


def start(started_by: ForkServerContext, log: Path, target: Callable[..., object], *args: Any) -> Started:
    """Start a process that calls a function."""
    log.write_bytes(b"")
    process = prepared(started_by, log, target, *args)
    process.start()
    return Started(process, log)


def _begin(log: Path, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(printed, stream)
    target(*args)


def rank_variables(rank: int, world: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """Variables that torchrun's agent sets for a rank of one machine."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return {**{name: str(number) for name, number in ranks.items()}, "MASTER_ADDR": host, "MASTER_PORT": str(port)}


AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Tells ranks that the store in which they meet belongs to the process that started them."""


FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Linux gives ports from 32768 on to connections."""

_reserved: deque[socket.socket] = deque(maxlen=64)
"""The latest reservations of this process: a port is opened long before 64 others are asked for."""


def free_port() -> int:
    """Reserve a port of this machine for a store or server that another process opens a moment later.

    A port that is free and closed again may be given away before its user opens the port: to another test process, or
    to any connection of this machine. Ports below those that systems give to connections, each reserved under a name
    that one process can hold, are safe from both.
    """
    while True:
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        if _reserve(port) and _is_free(port):
            return port


def _reserve(port: int) -> bool:
    if sys.platform != "linux":  # names without a file are Linux's
        return True
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0nxtrain-test-port-{port}")
    except OSError:
        name.close()
        return False
    if len(_reserved) == _reserved.maxlen:
        _reserved.popleft().close()
    _reserved.append(name)
    return True


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
