"""All ranks stop after the same step, whatever each has begun when it hears of the stop."""

from __future__ import annotations

import random
import threading

import pytest

from nxtrain.common.errors import LostPeerError
from nxtrain.train.supervision.coordinated_stop import StepGate


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_wait_for_each_other_in_each_step_stop_together(seed: int) -> None:
    """Threads stand for ranks, a barrier for the collectives of a step; one that stopped early would leave it."""
    world, total = 3, 60
    draw = random.Random(seed)
    gates = [StepGate() for _ in range(world)]
    meeting = threading.Barrier(world, timeout=60)
    stopped = [0] * world
    after = draw.randrange(total)
    reached = threading.Event()

    def rank(me: int) -> None:
        for step in range(1, total + 1):
            meeting.wait()
            if me == 0 and step == after:
                reached.set()
            if gates[me].stops(step) and step < total:
                stopped[me] = step
                return
        stopped[me] = total

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(world)]
    for thread in threads:
        thread.start()
    reached.wait(0.01 if after == 0 else 10)
    begun = []
    for gate in draw.sample(gates, world):  # one after the other, while the rest goes on
        begun.append(gate.freeze())
    for gate in gates:
        gate.decide(max(begun))
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert set(stopped) == {min(max(begun), total)}


def test_a_rank_begins_nothing_beyond_what_it_said() -> None:
    gate = StepGate()
    assert not gate.stops(4)
    assert gate.freeze() == 5
    gate.decide(6)
    assert not gate.stops(5)
    assert gate.stops(6)


def test_nobody_waits_for_a_rank_that_failed() -> None:
    gate = StepGate()
    gate.freeze()
    gate.lose("rank 1 failed")
    with pytest.raises(LostPeerError, match="rank 1 failed\nthe run was about to stop"):
        gate.stops(1)
