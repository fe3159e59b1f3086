"""What ranks that end early leave for the others, so that each can name the one that failed first.

The place for it is the store in which the ranks of `torch.distributed` meet. torchrun's agent holds it, and so it
outlives them; where rank 0 does, it ends with that rank, and the others know only whom they lost themselves.

Nothing here may take long: who reads it has lost a peer, and others wait for it to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from torch.distributed import PrefixStore, Store

Result = TypeVar("Result")

ANSWER_S = 3.0
"""A store that is there answers within milliseconds."""

GRACE_S = 2.0
"""How much later than another a rank may find that its own peer does not come: more than an action takes."""

SOON_S = 0.3
"""How much later than others the neighbours of a rank that died may find it; those that wait for this one wait on."""

LOOK_S = 0.02
"""Between looks for what others left."""


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

        return within(seconds, look) or ""

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

        return within(GRACE_S + ANSWER_S, follow)


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
