"""Failures of a run: the first one, the loss of a peer, and the error that each rank reports.

The first failure is kept in the store of the rendezvous. torchrun's agent holds that store, so that it outlives the
ranks. A store that rank 0 holds ends with rank 0; the other ranks then know only the peer that they lost themselves.

Every call is short: a rank that asks has lost a peer, and other ranks wait for it to end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import TypeVar

from torch.distributed import PrefixStore, Store

from nxtrain.errors import HangError, LostPeerError

Result = TypeVar("Result")

ANSWER_S = 3.0
"""A store that is there answers within milliseconds."""

GRACE_S = 2.0
"""How much later than another a rank may find that its own peer does not come: more than an action takes."""

SOON_S = 0.3
"""How much later than others the neighbours of a rank that died may find it; those that wait for this one wait on."""

LOOK_S = 0.02
"""Between looks for what others left."""


class FirstFailure:
    """The first failure of a run, and who waits for whom when ranks hang.

    Args:
        store: Where the ranks of this start of the run met.
    """

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("nxtrain/last_words", store)

    def leave(self, words: str) -> str:
        """Leave words unless another rank did before; those that count."""
        first = call_with_timeout(ANSWER_S, lambda: self._store.compare_set("first", "", words).decode())
        return first or words

    def first(self) -> str:
        """What a rank has left; empty if none has."""
        return self._store.get("first").decode() if self._store.check(["first"]) else ""

    def await_first(self, seconds: float) -> str:
        """What another rank leaves now or within some time; empty if none does."""
        limit = time.monotonic() + seconds

        def look() -> str:
            # A look at a time: a store takes nothing else from this process while it waits for a key.
            while not (first := self.first()) and time.monotonic() < limit:
                time.sleep(LOOK_S)
            return first

        return call_with_timeout(seconds, look) or ""

    def who_hangs(self, rank: int, peer: int | None) -> int | None:
        """The rank that others wait for, and that waits for nobody; None if nobody can tell.

        Args:
            rank: This one, which has waited for another as long as it may.
            peer: That one. It may have waited itself, and then says so soon. None: any of several.
        """

        def follow() -> int | None:
            self._store.set(f"waits/{rank}", "" if peer is None else str(peer))
            time.sleep(GRACE_S)
            seen, at = {rank}, peer
            while at is not None and self._store.check([f"waits/{at}"]):
                if at in seen:
                    return None
                seen.add(at)
                words = self._store.get(f"waits/{at}").decode()
                at = int(words) if words else None
            return at

        return call_with_timeout(GRACE_S + ANSWER_S, follow)


def call_with_timeout(seconds: float, work: Callable[[], Result]) -> Result | None:
    """What work returns; None if it fails, or takes longer and is left behind."""
    done: list[Result] = []

    def run() -> None:
        try:
            done.append(work())
        except RuntimeError:  # the store went with its rank
            return

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else None


_GONE = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|recv, got 0 bytes|ncclRemoteError", re.IGNORECASE
)
"""What gloo, torch's store and NCCL say of a connection whose other end is gone."""

_LATE = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)
"""What gloo and torch's store say when the other end does not come."""


@dataclass(frozen=True)
class Peers:
    """Those that a rank waits for.

    Args:
        words: How messages name them.
        rank: Its number if it is one; None: any of several.
        hang_timeout_s: Seconds that the group waits for them; 0: unknown.
    """

    words: str
    rank: int | None = None
    hang_timeout_s: float = 0.0


ANY = Peers("a rank that this one works with")


@contextmanager
def blaming(peers: Peers) -> Iterator[None]:
    """Turn what gloo says of a connection into what became of its other end; other failures stay what they are.

    NCCL says nothing here, since waiting is left to the stream: torch's watchdog ends the process after the same time.

    Source: torch 2.9, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; gloo/transport/tcp in
    https://github.com/pytorch/gloo.
    """
    try:
        yield
    except RuntimeError as error:
        found = loss(error, peers)
        if found is None:
            raise
        raise found from error


def loss(error: BaseException, peers: Peers = ANY) -> LostPeerError | HangError | None:
    """The loss of a peer, if that is what a failure comes from."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, LostPeerError | HangError):
            return at
        if isinstance(at, RuntimeError) and _GONE.search(str(at)):
            return _gone(at, peers)
        if isinstance(at, RuntimeError) and _LATE.search(first_line(at)):
            return _late(at, peers)
        at = at.__cause__
    return None


def _gone(error: RuntimeError, peers: Peers) -> LostPeerError:
    return LostPeerError(
        f"{peers.words} is gone: {first_line(error)}. It died, or left early; its own last lines say why", peers.rank
    )


def _late(error: RuntimeError, peers: Peers) -> HangError:
    limit = f"={peers.hang_timeout_s:g} seconds" if peers.hang_timeout_s else ""
    return HangError(
        f"{peers.words} did not come within recovery.hang_timeout_s{limit}: {first_line(error)}. "
        "It hangs, or does other work than was agreed; its own last lines say more",
        peers.rank,
    )


def first_line(error: BaseException) -> str:
    """What an error says, or what it is if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class FailureReporter:
    """The end of one rank.

    Args:
        store: Where the ranks of this start of the run met.
        rank: This one.
        hang_timeout_s: Seconds that ranks wait for each other.
        words: Names a rank.
    """

    def __init__(self, store: Store, rank: int, hang_timeout_s: float, words: Callable[[int], str]) -> None:
        self._last_words = FirstFailure(store)
        self._rank, self._hang_timeout_s, self._words = rank, hang_timeout_s, words
        self._answer: tuple[Exception, Exception] | None = None

    def failed(self, error: Exception) -> Exception:
        """Let the others know why this rank ends, or learn from them if it only lost one of them; takes a few seconds.

        Args:
            error: What ended it.

        Returns:
            What to tell: the error, or what a rank that failed before says of itself; the same for the same error.
        """
        if self._answer is None or self._answer[0] is not error:
            self._answer = error, self._explain(error)
        return self._answer[1]

    def _explain(self, error: Exception) -> Exception:
        words, me = self._last_words, self._words(self._rank)
        lost = loss(error)
        if lost is None:
            text = first_line(error)
            words.leave(text if text.startswith(me) else f"{me} failed: {type(error).__name__}: {text}")
            return error
        if isinstance(lost, HangError):
            return self._hung(lost)
        if lost.peer is None:
            first = words.await_first(SOON_S) or words.leave(first_line(lost))
        else:
            first = words.leave(f"{self._words(lost.peer)} is gone")
        if first in str(lost):
            return lost
        return LostPeerError(f"{first}\n{me} needs it, and ends too", lost.peer)

    def _hung(self, error: HangError) -> Exception:
        """Name the rank that hangs, where this one waited for another that waits for it in turn."""
        words = self._last_words
        hangs = words.who_hangs(self._rank, error.peer)
        if hangs is not None:
            limit = f"recovery.hang_timeout_s={self._hang_timeout_s:g}"
            words.leave(f"{self._words(hangs)} did not come within {limit} seconds")
        if hangs is not None and hangs == error.peer:
            return error
        # Others may find it a little later, or wait for it themselves.
        first = words.await_first(2 * GRACE_S)
        return HangError(f"{first}\n{self._words(self._rank)} waited too: {error}") if first else error
