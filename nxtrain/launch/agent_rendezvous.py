"""Rendezvous of a run's agents: its endpoint, error messages, and a check of the loopback addresses."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

LATE_S = 5.0
"""Seconds of waiting for other agents after which a message is printed."""

POLL_S = 1.0


@dataclass(frozen=True)
class AgentRendezvous:
    """Rendezvous endpoint: the machine and port of the agents' store.

    Args:
        host: Name of the machine; empty for a run on one machine.
        port: Port of the store.
        patience_s: Seconds that agents wait for each other.
    """

    host: str = ""
    port: int = 0
    patience_s: float = 600.0

    def __str__(self) -> str:
        """Format the endpoint as NAME:PORT."""
        return f"{self.host}:{self.port}"

    @contextmanager
    def announce_wait(self) -> Iterator[None]:
        """Context that prints a message if its body waits for other agents for more than `LATE_S` seconds."""
        line = f"waiting at {self} for the agents of the other machines, for up to {self.patience_s:g} seconds"
        timer = threading.Timer(LATE_S, print, (line,), {"file": sys.stderr, "flush": True})
        timer.daemon = True
        if self.host:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def await_host(self) -> None:
        """Wait until the machine of the store answers for the first time; it may start later, and may compile first.

        The wait for a name that does not resolve is torch's, which is shorter.
        """
        with suppress(OSError), self.announce_wait():
            socket.getaddrinfo(self.host, self.port)
            self.await_store(time.monotonic() + self.patience_s)

    def await_store(self, limit: float) -> bool:
        """Wait until the machine of the store answers again; return False if it does not answer before the limit.

        Args:
            limit: Time of `time.monotonic` at which the wait ends.
        """
        while self.host and time.monotonic() < limit:
            with suppress(OSError), socket.create_connection((self.host, self.port), timeout=POLL_S):
                return True
            time.sleep(POLL_S)
        return False


MISSING = "not all machines came in time"
"""Reason of a failed rendezvous whose error has no text."""


def failed_rendezvous(where: str, error: Exception) -> str:
    """Error message for agents that cannot connect to each other, with the reason and a remedy."""
    reason = reasons(error) or MISSING
    return (
        f"the agents of the run do not meet at {where}: {reason}. The address must be that of one of the "
        "machines, reachable from all others, with a port that no other program uses and no firewall blocks; start the "
        "same command on all machines, and use --rdzv-endpoint NAME:PORT with another port if this port is in use"
    )


def reasons(error: Exception) -> str:
    """Join the first lines of an error and of its causes into one line."""
    causes: list[BaseException] = [error]
    while isinstance(causes[-1].__cause__, Exception):
        causes.append(causes[-1].__cause__)
    return "; ".join(dict.fromkeys(str(cause).strip().splitlines()[0] for cause in causes if str(cause).strip()))


LOOPBACK_LIMIT_S = 5.0
"""Time limit, in seconds, of a connection within the machine, which a firewall may drop without an answer."""

LOOPBACK_ADDRESSES = ("127.0.0.1", "localhost")
"""Loopback addresses with which the agent and the ranks of one machine connect."""


def unreachable(limit_s: float = LOOPBACK_LIMIT_S) -> str:
    """Error message if processes of this machine cannot connect to each other, with a remedy; empty if they can."""
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
            f"the processes of this machine cannot reach each other at {address}: {why}. Ranks on one machine "
            "connect there; enable the loopback interface (ip link set lo up), allow it in the firewall, and map "
            "localhost to 127.0.0.1 in /etc/hosts"
        )
    return ""
