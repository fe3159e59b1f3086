"""Where the agents of a run on several machines meet, and what people are told of it."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

LATE_S = 5.0
"""After which people hear that others are waited for."""

POLL_S = 1.0


@dataclass(frozen=True)
class Meeting:
    """A place on one of the machines, whose agent holds the store of the rendezvous.

    Args:
        host: Its machine; empty: the run has one only.
        port: There.
        patience_s: Time that agents wait for one another.
    """

    host: str = ""
    port: int = 0
    patience_s: float = 600.0

    def __str__(self) -> str:
        """As on a command line."""
        return f"{self.host}:{self.port}"

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell that others are waited for, if that takes long."""
        timer = threading.Timer(LATE_S, self._tell)
        timer.daemon = True
        if self.host:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _tell(self) -> None:
        words = f"waiting at {self} for the agents of the other machines, for up to {self.patience_s:g} seconds"
        print(words, file=sys.stderr, flush=True)

    def await_store(self, limit: float) -> bool:
        """Wait until the machine is reached again that was lost; whether it was.

        Args:
            limit: Until when, as `time.monotonic` tells it.
        """
        while self.host and time.monotonic() < limit:
            with suppress(OSError), socket.create_connection((self.host, self.port), timeout=POLL_S):
                return True
            time.sleep(POLL_S)
        return False


def unmet(where: str, error: Exception) -> str:
    """Say why the agents of a run do not meet, and the way out."""
    return (
        f"the agents of the run do not meet at {where}: {reasons(error)}. It must name one of the machines as all "
        "others know it, with a port that nothing else uses there and no firewall closes; start the same command on "
        "all of them, and use --rdzv-endpoint NAME:PORT with another port where another program holds it"
    )


def reasons(error: Exception) -> str:
    """An error in a line, and those behind it."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and isinstance(cause, Exception):
        causes.append(cause)
    return "; ".join(dict.fromkeys(str(cause).strip().splitlines()[0] for cause in causes if str(cause).strip()))
