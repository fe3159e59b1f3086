"""Where ranks say what they are doing, apart from any collective: the store in which they met.

The watchdogs of all ranks read and write here, each from a thread of its own, while their main threads may hang.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nxtrain.distributed.first_failure import LastWords

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_S = 10.0
"""For a store that does not answer; one that is there does within milliseconds."""

ANSWER_S = 1.0
"""What ranks have to answer once one says that the run hangs; their watchdogs look twice within it."""


@dataclass(frozen=True)
class Beat:
    """What a rank does.

    Args:
        step: In which it is.
        section: Which part of it.
        age_s: Seconds that it has been there.
        waits: It waits for other ranks, as far as its stack tells.
        point: Innermost place of its main thread.
        spent: Seconds that its host has spent in each section of steps so far, apart from waiting for others.
    """

    step: int
    section: str
    age_s: float
    waits: bool = False
    point: str = ""
    spent: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """In words."""
        return f"step {self.step} ({self.section}) for {self.age_s:.1f} s" + (f", {self.point}" if self.point else "")


class Board:
    """What the ranks of one start of a run know of each other.

    Args:
        store: Where they met; it is talked to over a connection of its own, since one that waits blocks all others.
        rank, world: This rank, and how many there are.

    Raises:
        RuntimeError: From every method, when the store is gone.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        from torch.distributed import PrefixStore

        own: Any = store
        own = own.clone()
        own.set_timeout(timedelta(seconds=PATIENCE_S))
        self._own = own
        self._store: Any = PrefixStore("nxtrain/board", own)  # torch's stubs lack a part of a store
        self._words = LastWords(own)
        self._rank, self._world = rank, world

    def again(self) -> Board:
        """The same over a new connection; one that was too slow once may be out of step with its answers."""
        return Board(self._own, self._rank, self._world)

    def beat(self, beat: Beat) -> None:
        """Say what this rank does."""
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def beats(self) -> dict[int, Beat]:
        """What each rank said last, once all have said something."""
        if not self._store.check([f"beat/{rank}" for rank in range(self._world)]):
            return {}
        texts = self._store.multi_get([f"beat/{rank}" for rank in range(self._world)])
        return {rank: Beat(**json.loads(text)) for rank, text in enumerate(texts)}

    def advance(self, amount: int) -> int:
        """Add to what all ranks have received of a checkpoint, and tell the sum."""
        return int(self._store.add("received", amount))

    def calls(self) -> bool:
        """Whether some rank has asked for a stop, or says that the run hangs."""
        return bool(self._store.check(["call"]))

    def ask_stop(self, why: str) -> None:
        """Ask all ranks to stop."""
        self._store.compare_set("stop/why", "", why)
        self._store.set("call", "")

    def stop_asked(self) -> str:
        """Why the ranks are to stop; empty: they are not."""
        return self._text("stop/why")

    def say_begun(self, step: int) -> None:
        """Say which step this rank has begun last; who is the last to say so decides for all. May be said again."""
        self._store.set(f"stop/begun/{self._rank}", str(step))
        # Who says it twice counts twice, so that the number tells only when it is time to look.
        keys = [f"stop/begun/{rank}" for rank in range(self._world)]
        if self._store.add("stop/number", 1) >= self._world and self._store.check(keys):
            self._store.set("stop/step", str(max(map(int, self._store.multi_get(keys)))))

    def stop_step(self) -> int | None:
        """The step after which all stop, once that is decided."""
        text = self._text("stop/step")
        return int(text) if text else None

    def failure(self) -> str:
        """What a rank that failed has left for the others."""
        return self._words.first()

    def declare_hang(self) -> bool:
        """Say that the run hangs; whether this rank is the first to."""
        first: str = self._store.compare_set("hang/by", "", str(self._rank)).decode()
        self._store.set("call", "")
        return first == str(self._rank)

    def hang_declared(self) -> bool:
        """Whether some rank says that the run hangs."""
        return bool(self._store.check(["hang/by"]))

    def answer(self, beat: Beat) -> None:
        """Give a sign of life."""
        self._store.set(f"hang/{self._rank}", json.dumps(asdict(beat)))

    def answers(self) -> dict[int, Beat]:
        """The signs of life of all ranks that give one in time."""
        missing, found = set(range(self._world)), dict[int, Beat]()
        limit = time.monotonic() + ANSWER_S
        while missing and time.monotonic() < limit:
            for rank in sorted(missing):
                if text := self._text(f"hang/{rank}"):
                    found[rank] = Beat(**json.loads(text))
            missing -= found.keys()
            time.sleep(0.02)
        return found

    def last_beats(self, ranks: set[int]) -> dict[int, Beat]:
        """What some ranks said last, of those that ever said something."""
        texts = {rank: self._text(f"beat/{rank}") for rank in ranks}
        return {rank: Beat(**json.loads(text)) for rank, text in texts.items() if text}

    def judge(self, verdict: str) -> None:
        """Say for all ranks who hangs."""
        self._store.set("hang/verdict", verdict)

    def verdict(self) -> str:
        """Who hangs, as the first to declare it finds; empty if that takes too long."""
        return _soon(lambda: self._text("hang/verdict"), 3 * ANSWER_S)

    def _text(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


def _soon(work: Callable[[], str], seconds: float) -> str:
    limit = time.monotonic() + seconds
    while not (text := work()) and time.monotonic() < limit:
        time.sleep(0.02)
    return text
