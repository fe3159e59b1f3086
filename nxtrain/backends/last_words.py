"""What ranks that end early leave for the others, so that each can name the one that failed first.

The place for it is the store in which the ranks of `torch.distributed` meet. torchrun's agent holds it, and so it
outlives them; where rank 0 does, it ends with that rank, and the others know only whom they lost themselves.

Nothing here may take long: who reads it has lost a peer, and others wait for it to end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from torch.distributed import PrefixStore, Store

from nxtrain.errors import HangError, LostPeerError

Result = TypeVar("Result")

ANSWER_S = 3.0
"""A store that is there answers within milliseconds."""

GRACE_S = 2.0
"""How much later than another a rank may find that its own peer does not come: more than an action takes."""

_GONE = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|recv, got 0 bytes|ncclRemoteError", re.IGNORECASE
)
"""What gloo, torch's store and NCCL say of a connection whose other end is gone."""


class LastWords:
    """The first failure of a run, and who waits for whom when ranks hang.

    Args:
        store: Where the ranks of this start of the run met.
    """

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("nxtrain/last_words", store)

    def leave(self, words: str) -> str:
        """Leave words unless another rank did before; those that count."""
        first = within(ANSWER_S, lambda: self._store.compare_set("first", "", words).decode())
        return first or words

    def await_first(self) -> str:
        """What another rank leaves now or within `GRACE_S`; empty if none does."""
        return within(GRACE_S, lambda: self._store.get("first").decode()) or ""

    def who_hangs(self, rank: int, peer: int) -> int:
        """The rank that others wait for, and that waits for nobody.

        Args:
            rank: This one, which has waited for another as long as it may.
            peer: That one. It may have waited itself, and then says so soon.
        """

        def follow() -> int:
            self._store.set(f"waits/{rank}", str(peer))
            time.sleep(GRACE_S)
            seen, at = {rank}, peer
            while at not in seen and self._store.check([f"waits/{at}"]):
                seen.add(at)
                at = int(self._store.get(f"waits/{at}"))
            return at

        found = within(GRACE_S + ANSWER_S, follow)
        return peer if found is None or found == rank else found


def within(seconds: float, work: Callable[[], Result]) -> Result | None:
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


def loss(error: BaseException) -> LostPeerError | HangError | None:
    """The loss of a peer, if that is what a failure comes from."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, LostPeerError | HangError):
            return at
        if isinstance(at, RuntimeError) and _GONE.search(str(at)):
            return LostPeerError(f"a rank that this one works with is gone: {first_line(at)}")
        at = at.__cause__
    return None


def first_line(error: BaseException) -> str:
    """What an error says, or what it is if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
