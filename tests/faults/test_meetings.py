"""Ranks that cannot meet say where and why within the limit, with the exit code 5; one that is late is waited for."""

from __future__ import annotations

import socket
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from nxtrain.common.errors import BackendError
from tests.support.commands import ended, start_rank, write_config
from tests.support.ports import free_port
from tests.support.runs import course

LIMIT_S = 3.0
ENDS_S = 6.0
"""Until a process has ended: the limit, the way to it, and what is looked up for the message, on a busy machine."""

WAY_OUT = "It must name the first machine as all others know it, and a port that they reach and nothing else uses"


LIMIT = f"recovery.hang_timeout_s={LIMIT_S}"


def rank(folder: Path, number: int, port: int, *, world: int = 2, host: str = "127.0.0.1") -> BaseProcess:
    """Start one rank of the run of a folder."""
    return start_rank(folder, number, port, LIMIT, world=world, host=host)


def assert_refused(folder: Path, processes: dict[int, BaseProcess], *says: str) -> None:
    output = ended(folder, processes, LIMIT_S + ENDS_S)
    for number, process in processes.items():
        assert process.exitcode == BackendError.exit_code, output
        assert all(word in output[number] for word in says), output
        assert f"error: rank {number}: " in output[number]
        assert "Traceback" not in output[number]


def test_a_port_that_something_else_has_is_named_by_all_though_that_says_nothing(tmp_path: Path) -> None:
    write_config(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        first, second = rank(tmp_path, 0, port), rank(tmp_path, 1, port)
        output = ended(tmp_path, {0: first, 1: second}, LIMIT_S + ENDS_S)
    assert (first.exitcode, second.exitcode) == (BackendError.exit_code,) * 2, output
    assert f"port {port} is in use on this machine" in output[0]
    assert "something listens there that is no store of torch" in output[1]
    assert WAY_OUT in output[0]
    assert WAY_OUT in output[1]


def test_a_name_that_does_not_resolve_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    says = ("the name no-such-host.invalid does not resolve on this machine", WAY_OUT)
    assert_refused(tmp_path, {1: rank(tmp_path, 1, free_port(), host="no-such-host.invalid")}, *says)


def test_a_first_rank_that_never_comes_is_told(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert_refused(tmp_path, {1: rank(tmp_path, 1, free_port())}, "nobody listens there", WAY_OUT)


def test_a_rank_of_another_world_ends_all_at_once(tmp_path: Path) -> None:
    write_config(tmp_path)
    port = free_port()
    processes = {0: rank(tmp_path, 0, port, world=3), 1: rank(tmp_path, 1, port, world=2)}
    assert_refused(tmp_path, processes, "WORLD_SIZE=", "all ranks need the same", "--nproc-per-node")


def test_a_first_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    write_config(tmp_path, steps=3)
    port = free_port()
    second = rank(tmp_path, 1, port)
    time.sleep(LIMIT_S / 2)  # the rest is for the start of the process, on a busy machine
    first = rank(tmp_path, 0, port)
    output = ended(tmp_path, {0: first, 1: second}, 30.0)
    assert (first.exitcode, second.exitcode) == (0, 0), output
    assert [record["step"] for record in course(tmp_path / "run")] == [1, 2, 3]
