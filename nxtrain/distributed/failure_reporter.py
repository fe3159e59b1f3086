"""How a rank that ends early parts from the others: what it leaves for them, and what it tells itself."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import Store

from nxtrain.distributed.first_failure import GRACE_S, SOON_S, LastWords
from nxtrain.distributed.lost_peers import first_line, loss
from nxtrain.errors import HangError, LostPeerError


class Parting:
    """The end of one rank.

    Args:
        store: Where the ranks of this start of the run met.
        rank: This one.
        hang_timeout_s: Seconds that ranks wait for each other.
        words: Names a rank.
    """

    def __init__(self, store: Store, rank: int, hang_timeout_s: float, words: Callable[[int], str]) -> None:
        self._last_words = LastWords(store)
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
