"""Rendezvous of agents, its messages, and the check of the loopback addresses."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from typing import Any

import pytest

from nxtrain.launch import agent_rendezvous
from nxtrain.launch.agent_rendezvous import AgentRendezvous, failed_rendezvous, reasons, unreachable


def test_a_machine_that_is_back_ends_the_wait_and_one_that_is_not_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous = AgentRendezvous("127.0.0.1", server.getsockname()[1])
        assert rendezvous.await_store(time.monotonic() + 5.0)
    begin = time.monotonic()
    assert not rendezvous.await_store(begin + 0.1)
    assert time.monotonic() - begin < 3.0


def test_a_host_that_starts_later_is_waited_for_and_an_unknown_name_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rendezvous = AgentRendezvous("127.0.0.1", port, patience_s=60.0)
    servers: list[socket.socket] = []
    timer = threading.Timer(0.3, lambda: servers.append(socket.create_server(("127.0.0.1", port))))
    timer.start()
    begin = time.monotonic()
    rendezvous.await_host()
    assert servers
    servers[0].close()
    AgentRendezvous("nobody.invalid", port, patience_s=60.0).await_host()
    AgentRendezvous("127.0.0.1", port, patience_s=0.1).await_host()
    assert time.monotonic() - begin < 10.0


def test_machines_that_do_not_come_are_the_reason_of_an_error_without_text() -> None:
    assert "do not meet at n1:1: not all machines came in time. " in failed_rendezvous("n1:1", TimeoutError())


def test_nobody_is_waited_for_without_other_machines() -> None:
    assert not AgentRendezvous().await_store(time.monotonic() + 60.0)


def test_others_that_are_waited_for_are_told_only_if_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rendezvous = AgentRendezvous("node0", 29500, patience_s=60.0)
    with rendezvous.announce_wait():
        pass
    monkeypatch.setattr(agent_rendezvous, "LATE_S", 0.01)
    with rendezvous.announce_wait():
        time.sleep(0.2)
    assert (
        capfd.readouterr().err == "waiting at node0:29500 for the agents of the other machines, for up to 60 seconds\n"
    )


def test_an_error_has_the_first_line_of_each_that_it_comes_from() -> None:
    try:
        try:
            raise OSError("no route\n at frame 1")
        except OSError as error:
            raise RuntimeError("the store is lost") from error
    except RuntimeError as error:
        assert reasons(error) == "the store is lost; no route"


def test_nothing_is_wrong_here() -> None:
    assert unreachable() == ""


DOWN = OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize(
    ("address", "error", "says"),
    [
        ("127.0.0.1", DOWN, "cannot reach each other at 127.0.0.1: Network is unreachable"),
        ("localhost", UNKNOWN, "cannot reach each other at localhost: Name or service not known"),
        ("localhost", TimeoutError("timed out"), "cannot reach each other at localhost: no answer within 3 seconds"),
    ],
)
def test_the_address_and_the_reason_are_named(
    monkeypatch: pytest.MonkeyPatch, address: str, error: OSError, says: str
) -> None:
    connect = socket.create_connection

    def fail(where: tuple[str, int], timeout: float, **rest: Any) -> socket.socket:
        assert timeout == 3.0
        if where[0] == address:
            raise error
        return connect(where, timeout, **rest)

    monkeypatch.setattr(socket, "create_connection", fail)
    result = unreachable(limit_s=3.0)
    assert says in result
    assert "ip link set lo up" in result


def test_a_machine_without_addresses_of_its_own_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> socket.socket:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    monkeypatch.setattr(socket, "create_server", fail)
    assert "127.0.0.1: Cannot assign requested address" in unreachable()
