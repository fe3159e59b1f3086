"""Processes of one machine reach each other, or people are told at once why they do not."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

from nxtrain.launch import loopback
from nxtrain.launch.loopback import unreachable


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
    found = unreachable(limit_s=3.0)
    assert says in found
    assert "ip link set lo up" in found


def test_a_machine_without_addresses_of_its_own_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> socket.socket:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    monkeypatch.setattr(socket, "create_server", fail)
    assert "127.0.0.1: Cannot assign requested address" in unreachable()


def test_every_address_has_a_limit() -> None:
    assert loopback.LIMIT_S * len(loopback.ADDRESSES) <= 10.0
