"""Check of the loopback addresses between processes of one machine, before anything waits for an answer there."""

from __future__ import annotations

import socket

LIMIT_S = 5.0
"""Limit for a connection within a machine. It takes microseconds, but a firewall may drop it without an answer."""

ADDRESSES = ("127.0.0.1", "localhost")
"""Addresses that the agent and the ranks of a run on one machine use."""


def unreachable(limit_s: float = LIMIT_S) -> str:
    """Reason why processes of this machine do not reach each other, with the way out; empty if they do.

    Args:
        limit_s: Time for each address.
    """
    address = ADDRESSES[0]
    try:
        with socket.create_server((address, 0)) as server:
            for address in ADDRESSES:
                socket.create_connection((address, server.getsockname()[1]), timeout=limit_s).close()
    except OSError as error:
        why = f"no answer within {limit_s:g} seconds" if isinstance(error, TimeoutError) else error.strerror
        return (
            f"the processes of this machine cannot reach each other at {address}: {why}. Ranks on one machine meet "
            "there; bring the loopback interface up (ip link set lo up), let a firewall pass it, and have /etc/hosts "
            "name 127.0.0.1 localhost"
        )
    return ""
