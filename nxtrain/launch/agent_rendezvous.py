"""Rendezvous of the agents of a run, the check of its loopback addresses, and its messages for the user."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

LATE_S = 5.0
"""Seconds of waiting after which a message names the rendezvous."""

POLL_S = 1.0


@dataclass(frozen=True)
class AgentRendezvous:
    """Endpoint on the machine whose agent holds the rendezvous store.

    Args:
        host: Name of the machine; empty: the run has only one machine.
        patience_s: Seconds that agents wait for one another.
    """

    host: str = ""
    port: int = 0
    patience_s: float = 600.0

    def __str__(self) -> str:
        """Endpoint as on a command line."""
        return f"{self.host}:{self.port}"

    @contextmanager
    def announce_wait(self) -> Iterator[None]:
        """Print a message if the wait inside this context takes long."""
        line = f"waiting at {self} for the agents of the other machines, for up to {self.patience_s:g} seconds"
        timer = threading.Timer(LATE_S, print, (line,), {"file": sys.stderr, "flush": True})
        timer.daemon = True
        if self.host:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def await_store(self, limit: float) -> bool:
        """Wait until the lost machine of the store answers again; False if it did not before the limit.

        Args:
            limit: End of the wait on the clock of `time.monotonic`.
        """
        while self.host and time.monotonic() < limit:
            with suppress(OSError), socket.create_connection((self.host, self.port), timeout=POLL_S):
                return True
            time.sleep(POLL_S)
        return False


def unmet(where: str, error: Exception) -> str:
    """Message for agents that do not find each other: the reason and the way out."""
    return (
        f"the agents of the run do not meet at {where}: {reasons(error)}. It must name one of the machines as all "
        "others know it, with a port that nothing else uses there and no firewall closes; start the same command on "
        "all of them, and use --rdzv-endpoint NAME:PORT with another port where another program holds it"
    )


def reasons(error: Exception) -> str:
    """First lines of an error and of its causes, in one line."""
    causes: list[BaseException] = [error]
    while isinstance(causes[-1].__cause__, Exception):
        causes.append(causes[-1].__cause__)
    return "; ".join(dict.fromkeys(str(cause).strip().splitlines()[0] for cause in causes if str(cause).strip()))


LOOPBACK_LIMIT_S = 5.0
"""Limit for a connection within a machine. It takes microseconds, but a firewall may drop it without an answer."""

LOOPBACK_ADDRESSES = ("127.0.0.1", "localhost")
"""Addresses that the agent and the ranks of a run on one machine use."""


def unreachable(limit_s: float = LOOPBACK_LIMIT_S) -> str:
    """Reason why processes of this machine do not reach each other, with the way out; empty if they do."""
    address = LOOPBACK_ADDRESSES[0]
    try:
        with socket.create_server((address, 0)) as server:
            for address in LOOPBACK_ADDRESSES:
                socket.create_connection((address, server.getsockname()[1]), timeout=limit_s).close()
    except OSError as error:
        why = error.strerror
        if isinstance(error, TimeoutError):
            why = f"no answer within {limit_s:g} seconds"
        return (
            f"the processes of this machine cannot reach each other at {address}: {why}. Ranks on one machine meet "
            "there; bring the loopback interface up (ip link set lo up), let a firewall pass it, and have /etc/hosts "
            "name 127.0.0.1 localhost"
        )
    return ""
