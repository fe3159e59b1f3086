"""Error reports of a failed run: the first failure, the loss of a peer rank, and the error that each rank raises.

The rendezvous store holds the first failure. A store of torchrun's agent outlives the ranks. A store of rank 0 ends
with rank 0. Each other rank then knows only the peer that it lost.

Every call is short, since other ranks wait for the caller to exit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from torch.distributed import PrefixStore, Store

from nxtrain.common.errors import HangError, LostPeerError
from nxtrain.common.process.deadlines import start_daemon

Result = TypeVar("Result")

ANSWER_S = 3.0
"""Timeout of a store request in seconds; a reachable store answers within milliseconds."""

GRACE_S = 2.0
"""Seconds by which the timeouts of two hanging ranks may differ; longer than one pipeline action."""

SOON_S = 0.3
"""Seconds by which two ranks may differ in detecting the same dead rank. Other ranks wait for this rank meanwhile."""

LOOK_S = 0.02
"""Seconds between polls of the store for the failure of another rank."""


class FirstFailure:
    """The first failure of a run in the rendezvous store. For a hang, also the rank that each rank waits for."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("nxtrain/last_words", store)

    def publish(self, text: str) -> str:
        """Publish a failure unless another rank has already published one; return the first failure."""
        first = call_with_timeout(ANSWER_S, lambda: self._store.compare_set("first", "", text).decode())
        return first or text

    def first(self) -> str:
        """First published failure; an empty string if there is none."""
        return self._store.get("first").decode() if self._store.check(["first"]) else ""

    def await_first(self, seconds: float) -> str:
        """Wait up to `seconds` for the first published failure; return an empty string if there is none."""
        limit = time.monotonic() + seconds

        def look() -> str:
            # Polling: while a store waits for a key, it serves no other request of this process.
            first = self.first()
            while not first and time.monotonic() < limit:
                time.sleep(LOOK_S)
                first = self.first()
            return first

        return call_with_timeout(seconds, look) or ""

    def find_hanging_rank(self, rank: int, peer: int | None) -> int | None:
        """Find the hanging rank: follow the chain of waiting ranks to the rank that waits for no other.

        Returns None if the hanging rank is unknown.

        Args:
            rank: This rank, whose wait for `peer` has timed out.
            peer: The rank that this rank waited for, which soon publishes its own wait if it has one. None for any of
                several
                ranks.
        """

        def follow() -> int | None:
            self._store.set(f"waits/{rank}", "" if peer is None else str(peer))
            time.sleep(GRACE_S)
            seen, at = {rank}, peer
            while at is not None and self._store.check([f"waits/{at}"]):
                if at in seen:
                    return None
                seen.add(at)
                awaited = self._store.get(f"waits/{at}").decode()
                at = int(awaited) if awaited else None
            return at

        return call_with_timeout(GRACE_S + ANSWER_S, follow)


def call_with_timeout(seconds: float, work: Callable[[], Result]) -> Result | None:
    """Call a function in a thread, and return its result; None if the call fails or exceeds the time limit."""
    done: list[Result] = []
    ended = Event()

    def run() -> None:
        try:
            done.append(work())
        except RuntimeError:  # the store ended with its rank
            return
        finally:
            ended.set()

    start_daemon(run)
    ended.wait(seconds)
    return done[0] if done else None


_GONE = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|recv, got 0 bytes|ncclRemoteError"
    r"|failed to pass monitoredBarrier|successfully reached monitoredBarrier, but received errors",
    re.IGNORECASE,
)
"""Error messages of gloo, torch's store and NCCL for a closed connection. The last two patterns are of a monitored
barrier.

torch runs a monitored barrier before each collective under `recovery.debug=dist`. The watchdog reports a late rank.
"""

_LATE = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)
"""Error messages of gloo and torch's store for a timeout."""


@dataclass(frozen=True)
class Peers:
    """The rank or ranks that a rank waits for, as named in an error message.

    Args:
        name: Name of the ranks in messages.
        rank: The rank, if there is exactly one; None otherwise.
        limit: Name of the timeout in messages.
    """

    name: str
    rank: int | None = None
    limit: str = "recovery.hang_timeout_s"


ANY = Peers("another rank of this rank's process group")


@contextmanager
def translate_peer_errors(peers: Peers) -> Iterator[None]:
    """Translate gloo's connection errors in this context into a LostPeerError or HangError that names the peer.

    Other errors pass unchanged.

    NCCL raises no error here, since only the stream waits. torch's watchdog ends the process after the same timeout.

    Source: torch 2.9, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; gloo/transport/tcp in
    https://github.com/pytorch/gloo.
    """
    try:
        yield
    except RuntimeError as error:
        lost = loss(error, peers)
        if lost is None:
            raise
        raise lost from error


def loss(error: BaseException, peers: Peers = ANY) -> LostPeerError | HangError | None:
    """Find the loss or hang of a peer rank in an error's chain of causes; None if there is none."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, LostPeerError | HangError):
            return at
        if isinstance(at, RuntimeError) and _GONE.search(str(at)):
            return lost_peer(peers, first_line(at))
        if isinstance(at, RuntimeError) and _LATE.search(first_line(at)):
            return peer_timeout(peers, first_line(at))
        at = at.__cause__
    return None


def lost_peer(peers: Peers, why: str) -> LostPeerError:
    """LostPeerError for a peer rank that has ended; `why` is the error that this rank saw."""
    return LostPeerError(
        f"{peers.name} is gone: {why}. Its process crashed or exited early; the last lines of its log show why",
        peers.rank,
    )


def peer_timeout(peers: Peers, why: str) -> HangError:
    """HangError for a peer rank that did not respond before the timeout; `why` is the error that this rank saw."""
    return HangError(
        f"{peers.name} did not come within {peers.limit}: {why}. "
        "It hangs, or runs other collectives than this rank; the last lines of its log show more",
        peers.rank,
    )


def first_line(error: BaseException) -> str:
    """First line of an error's message, or its type's name if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class FailureReporter:
    """Publisher of this rank's failure to the other ranks; `rank_name` returns the name of a rank for messages."""

    def __init__(self, store: Store, rank: int, hang_timeout_s: float, rank_name: Callable[[int], str]) -> None:
        self._first_failure = FirstFailure(store)
        self._rank, self._rank_name = rank, rank_name
        self._hang_timeout_s = hang_timeout_s
        self._answer: tuple[Exception, Exception] | None = None

    def failed(self, error: Exception) -> Exception:
        """Publish this rank's failure, and return the error that this rank reports.

        If this rank only lost a peer, the returned error is the first failure of the run. Takes a few seconds. Repeated
        calls return the same error.
        """
        if self._answer is None or self._answer[0] is not error:
            self._answer = error, self._explain(error)
        return self._answer[1]

    def _explain(self, error: Exception) -> Exception:
        failure, me = self._first_failure, self._rank_name(self._rank)
        lost = loss(error)
        if lost is None:
            text = first_line(error)
            failure.publish(text if text.startswith(me) else f"{me} failed: {type(error).__name__}: {text}")
            return error
        if isinstance(lost, HangError):
            # The error names the hanging rank, unless this rank's own peer hangs, or nothing else is known.
            hangs = failure.find_hanging_rank(self._rank, lost.peer)
            if hangs is not None:
                limit = f"recovery.hang_timeout_s={self._hang_timeout_s:g}"
                failure.publish(f"{self._rank_name(hangs)} did not come within {limit} seconds")
            if hangs is not None and hangs == lost.peer:
                return lost
            # Other ranks may detect the hang a little later, or wait for the hanging rank themselves.
            first = failure.await_first(2 * GRACE_S)
            return HangError(f"{first}\n{me} waited too: {lost}") if first else lost
        if lost.peer is None:
            first = failure.await_first(SOON_S) or failure.publish(first_line(lost))
        else:
            first = failure.publish(f"{self._rank_name(lost.peer)} is gone")
        if first in str(lost):
            return lost
        return LostPeerError(f"{first}\n{me} needs it, and ends too", lost.peer)
