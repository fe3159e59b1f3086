"""Ports for stores and servers that another process opens a moment later.

A port that is found free and closed again may be given away before its user opens it: to another test process, or to
any connection of this machine. Ports below those that systems give to connections, each reserved under a name that one
process can hold, are safe from both.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections import deque

VARIABLE = "NXTRAIN_TEST_PATIENCE"
"""Variable with the factor; 1 if it is not set."""


def patient_s(seconds: float) -> float:
    """A limit in seconds, times the factor of this test session."""
    return seconds * float(os.environ.get(VARIABLE) or 1)


FIRST, LAST = 20_000, 32_000
"""Linux gives ports from 32768 on to connections."""

_reserved: deque[socket.socket] = deque(maxlen=64)
"""The latest reservations of this process: a port is opened long before 64 others are asked for."""


def free_port() -> int:
    """A port of this machine that nothing uses, and that no other test process gets meanwhile."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST)
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
