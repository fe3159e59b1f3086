"""Heartbeats of all ranks in the rendezvous store, independent of collectives.

The watchdog thread of each rank reads and writes heartbeats, even while the main thread hangs. A lost connection to
the store is reopened.
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
"""Timeout of a store request in seconds; a reachable store answers within milliseconds."""

ANSWER_S = 1.0
"""Seconds within which ranks answer a declared hang. Each watchdog polls the store twice in this time."""


class Queued(NamedTuple):
    """Newest collective that a rank has queued on one communicator.

    Args:
        operation: Name of the collective.
        number: Position of the collective in the sequence of the communicator.
        done: Position of the newest collective that the device has completed.
    """

    operation: str
    number: int
    done: int


@dataclass(frozen=True)
class Beat:
    """Heartbeat of a rank: its step, the section of the step that it is in, and its measured times.

    Args:
        step: Current step.
        section: Current section of the step, such as the forward pass or a save.
        age_s: Seconds since the rank entered the section.
        waits: True if the stack of the main thread shows that the rank waits for other ranks.
        point: Innermost frame of the main thread's stack.
        counted: Number of steps that `spent` covers.
        spent: Seconds of the rank in these steps by kind of work, without waits for other ranks.
        host: Host name of the rank.
        queued: Newest collective of each communicator, on devices that record them. Only in answers to a hang.
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
        """Parse a heartbeat from its JSON text in the store."""
        values = json.loads(text)
        queued = {name: Queued(*entry) for name, entry in values.pop("queued").items()}
        return Beat(**values, queued=queued)

    def __str__(self) -> str:
        """Text of the heartbeat for messages."""
        return f"step {self.step} ({self.section}) for {self.age_s:.1f} s" + (f", {self.point}" if self.point else "")


class HeartbeatStore:
    """Heartbeats, stop requests and hang reports of all ranks since the last launch, in the rendezvous store.

    The store is cloned, since a waiting request blocks all other requests of a connection. Every method raises a
    RuntimeError once the store is unreachable.
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
        """Copy of the store over a new connection, since the old one may return late answers after a timeout."""
        return HeartbeatStore(self._own, self._rank, self._world)

    def beat(self, beat: Beat) -> None:
        """Publish this rank's heartbeat."""
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def beats(self) -> dict[int, Beat]:
        """Last heartbeat of each rank, by rank; empty until every rank has published one."""
        if not self._store.check([f"beat/{rank}" for rank in range(self._world)]):
            return {}
        texts = self._store.multi_get([f"beat/{rank}" for rank in range(self._world)])
        return {rank: Beat.read(text) for rank, text in enumerate(texts)}

    def advance(self, amount: int) -> int:
        """Add to the number of checkpoint bytes that all ranks have transferred, and return the new sum."""
        return int(self._store.add("received", amount))

    def calls(self) -> bool:
        """True if any rank has requested a stop or declared a hang."""
        return bool(self._store.check(["call"]))

    def ask_stop(self, why: str) -> None:
        """Request a stop of all ranks, for the reason `why`."""
        self._store.compare_set("stop/why", "", why)
        self._store.set("call", "")

    def stop_asked(self) -> str:
        """Reason of a requested stop; empty if no stop is requested."""
        return self._text("stop/why")

    def publish_begun(self, step: int) -> None:
        """Publish the newest step that this rank has begun; may be repeated.

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
        """First published failure of the run; empty if there is none."""
        return self._first_failure.first()

    def declare_hang(self) -> bool:
        """Declare a hang of the run; return True if this rank is the first to declare it."""
        first: str = self._store.compare_set("hang/by", "", str(self._rank)).decode()
        self._store.set("call", "")
        return first == str(self._rank)

    def hang_declared(self) -> bool:
        """True if any rank has declared a hang."""
        return bool(self._store.check(["hang/by"]))

    def answer(self, beat: Beat) -> None:
        """Publish this rank's heartbeat as its answer to a declared hang."""
        self._store.set(f"hang/{self._rank}", json.dumps(asdict(beat)))

    def answers(self) -> dict[int, Beat]:
        """Collect the heartbeats with which ranks answer a declared hang, until a timeout."""
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
        """Last heartbeat of each of some ranks; a rank without any heartbeat is left out."""
        texts = {rank: self._text(f"beat/{rank}") for rank in ranks}
        return {rank: Beat.read(text) for rank, text in texts.items() if text}

    def judge(self, verdict: str) -> None:
        """Publish the verdict on a declared hang, a message that names the hanging ranks."""
        self._store.set("hang/verdict", verdict)

    def verdict(self) -> str:
        """Wait for the published verdict on a declared hang; return an empty string after a timeout."""
        limit = time.monotonic() + 3 * ANSWER_S
        verdict = self._text("hang/verdict")
        while not verdict and time.monotonic() < limit:
            time.sleep(0.02)
            verdict = self._text("hang/verdict")
        return verdict

    def _text(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


class HeartbeatLink:
    """Connection to a heartbeat store, which may be lost and reopened.

    Attributes:
        store: The heartbeat store; None while its connection is lost.
        is_alone: The run has only one rank, or no heartbeat store.
    """

    def __init__(self, store: HeartbeatStore | None) -> None:
        self.store = store
        self.is_alone = store is None
        self._lost: HeartbeatStore | None = None
        self._lost_at = 0.0
        self._connecting = SingleTask()

    @property
    def lost_s(self) -> float:
        """Seconds since the connection to the store was lost; 0 while connected."""
        return time.monotonic() - self._lost_at if self._lost is not None and self.store is None else 0.0

    def lose(self) -> None:
        """Drop the connection to the store, and open a new one, since the store may have been slow only once."""
        if self.store is not None:
            self._lost, self.store = self.store, None
            self._lost_at = time.monotonic()
        self.reach()

    def reach(self) -> None:
        """Reopen a lost connection to the store, in a background thread."""

        def connect() -> None:
            with suppress(RuntimeError):  # tried again at the next beat
                self.store = self._lost.again() if self._lost is not None else None

        if self.store is None and self._lost is not None:
            self._connecting.start(connect)
