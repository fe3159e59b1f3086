"""Heartbeats of all ranks, in the store of the rendezvous and independent of collectives.

The watchdog of each rank reads and writes heartbeats in a separate thread, while the main thread may hang. A lost
connection to the store is opened again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from nxtrain.common.distributed.failures import FirstFailure
from nxtrain.common.process.deadlines import SingleTask

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_S = 10.0
"""Seconds to wait for the store; a reachable store answers within milliseconds."""

ANSWER_S = 1.0
"""Seconds for ranks to answer after a declared hang; each watchdog reads the store twice within this time."""


class Queued(NamedTuple):
    """Newest collective that a rank has queued on a communicator.

    Args:
        operation: Name of the collective.
        number: Position of the collective in the sequence of the communicator.
        done: Newest position that the device has done.
    """

    operation: str
    number: int
    done: int


@dataclass(frozen=True)
class Beat:
    """Heartbeat of a rank: its step, its section of work, and its measured times.

    Args:
        age_s: Seconds since the rank entered the section.
        waits: True if the rank waits for other ranks, by its stack.
        point: Innermost frame of the main thread's stack.
        counted: Number of steps whose work `spent` holds.
        spent: Seconds of the rank by kind of work in these steps, without the waits for other ranks.
        queued: Newest collectives by communicator, where the device records them; in answers to a hang only.
    """

    step: int
    section: str
    age_s: float
    waits: bool = False
    point: str = ""
    counted: int = 0
    spent: Mapping[str, float] = field(default_factory=dict)
    host: str = ""
    queued: Mapping[str, Queued] = field(default_factory=dict)

    @staticmethod
    def read(text: str) -> Beat:
        """Heartbeat from its text in the store."""
        values = json.loads(text)
        queued = {name: Queued(*entry) for name, entry in values.pop("queued").items()}
        return Beat(**values, queued=queued)

    def __str__(self) -> str:
        """Text of the heartbeat in messages."""
        return f"step {self.step} ({self.section}) for {self.age_s:.1f} s" + (f", {self.point}" if self.point else "")


class HeartbeatStore:
    """Heartbeats, stop requests and hang reports of the ranks of one start, in the store of the rendezvous.

    The store is cloned, since a waiting request blocks all others of a connection. Every method raises a RuntimeError
    once the store is gone.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        from torch.distributed import PrefixStore

        clone: Any = store
        clone = clone.clone()
        clone.set_timeout(timedelta(seconds=PATIENCE_S))
        self._own = clone
        self._store: Any = PrefixStore("nxtrain/board", clone)  # torch's stubs lack some methods of a store
        self._first_failure = FirstFailure(clone)
        self._rank, self._world = rank, world

    def again(self) -> HeartbeatStore:
        """Copy of the store over a new connection; after a timeout, the old one may mix up answers."""
        return HeartbeatStore(self._own, self._rank, self._world)

    def beat(self, beat: Beat) -> None:
        """Publish this rank's heartbeat."""
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def beats(self) -> dict[int, Beat]:
        """Last heartbeat of each rank; empty until all ranks have published one."""
        if not self._store.check([f"beat/{rank}" for rank in range(self._world)]):
            return {}
        texts = self._store.multi_get([f"beat/{rank}" for rank in range(self._world)])
        return {rank: Beat.read(text) for rank, text in enumerate(texts)}

    def advance(self, amount: int) -> int:
        """Add to the checkpoint bytes that all ranks have transferred, and return the sum."""
        return int(self._store.add("received", amount))

    def calls(self) -> bool:
        """True if any rank has asked for a stop or declared a hang."""
        return bool(self._store.check(["call"]))

    def ask_stop(self, why: str) -> None:
        """Ask all ranks to stop."""
        self._store.compare_set("stop/why", "", why)
        self._store.set("call", "")

    def stop_asked(self) -> str:
        """Reason of the requested stop; empty without a request."""
        return self._text("stop/why")

    def publish_begun(self, step: int) -> None:
        """Publish the last step that this rank has begun; may be repeated.

        The last rank to publish sets the step after which all ranks stop.
        """
        self._store.set(f"stop/begun/{self._rank}", str(step))
        # A rank that publishes twice counts twice, so that the count only shows when to read the keys.
        keys = [f"stop/begun/{rank}" for rank in range(self._world)]
        if self._store.add("stop/number", 1) >= self._world and self._store.check(keys):
            self._store.set("stop/step", str(max(map(int, self._store.multi_get(keys)))))

    def stop_step(self) -> int | None:
        """Step after which all ranks stop; None until the step is decided."""
        text = self._text("stop/step")
        return int(text) if text else None

    def failure(self) -> str:
        """First published failure; empty if there is none."""
        return self._first_failure.first()

    def declare_hang(self) -> bool:
        """Declare a hang; return True if this rank is the first to do so."""
        first: str = self._store.compare_set("hang/by", "", str(self._rank)).decode()
        self._store.set("call", "")
        return first == str(self._rank)

    def hang_declared(self) -> bool:
        """True if any rank has declared a hang."""
        return bool(self._store.check(["hang/by"]))

    def answer(self, beat: Beat) -> None:
        """Publish this rank's answer to a declared hang."""
        self._store.set(f"hang/{self._rank}", json.dumps(asdict(beat)))

    def answers(self) -> dict[int, Beat]:
        """Answers to a declared hang, from all ranks that answer in time."""
        missing, answers = set(range(self._world)), dict[int, Beat]()
        limit = time.monotonic() + ANSWER_S
        while missing and time.monotonic() < limit:
            for rank in sorted(missing):
                text = self._text(f"hang/{rank}")
                if text:
                    answers[rank] = Beat.read(text)
            missing -= answers.keys()
            time.sleep(0.02)
        return answers

    def last_beats(self, ranks: set[int]) -> dict[int, Beat]:
        """Last heartbeats of some ranks; ranks that never published one are left out."""
        texts = {rank: self._text(f"beat/{rank}") for rank in ranks}
        return {rank: Beat.read(text) for rank, text in texts.items() if text}

    def judge(self, verdict: str) -> None:
        """Publish the verdict on a hang: the ranks that hang."""
        self._store.set("hang/verdict", verdict)

    def verdict(self) -> str:
        """Wait for the verdict of the rank that declared the hang first; empty after a time limit."""
        limit = time.monotonic() + 3 * ANSWER_S
        verdict = self._text("hang/verdict")
        while not verdict and time.monotonic() < limit:
            time.sleep(0.02)
            verdict = self._text("hang/verdict")
        return verdict

    def _text(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


class HeartbeatLink:
    """Connection to a heartbeat store, which may be lost and opened again.

    Attributes:
        store: The heartbeat store; None while its connection is lost.
        is_alone: The run has one rank, or no heartbeat store.
    """

    def __init__(self, store: HeartbeatStore | None) -> None:
        self.store = store
        self.is_alone = store is None
        self._lost: HeartbeatStore | None = None
        self._lost_at = 0.0
        self._connecting = SingleTask()

    @property
    def lost_s(self) -> float:
        """Seconds since the connection was lost; 0 while the connection works."""
        return time.monotonic() - self._lost_at if self._lost is not None and self.store is None else 0.0

    def lose(self) -> None:
        """Close the connection to the store, and open a new one: the store may have been slow only once."""
        if self.store is not None:
            self._lost, self.store = self.store, None
            self._lost_at = time.monotonic()
        self.reach()

    def reach(self) -> None:
        """Open a new connection to a lost store, in a background thread."""

        def connect() -> None:
            with suppress(RuntimeError):  # tried again at the next beat
                self.store = self._lost.again() if self._lost is not None else None

        if self.store is None and self._lost is not None:
            self._connecting.start(connect)
