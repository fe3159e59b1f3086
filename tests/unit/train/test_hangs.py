"""Rank that is named for a hang, from the positions of all ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from nxtrain.common.distributed.heartbeats import Beat, Queued
from nxtrain.train.supervision.coordinated_stop import StepGate
from nxtrain.train.supervision.hang_diagnosis import judge, point, waits

LIMIT = "recovery.hang_timeout_s=3"


def said(result: dict[int, Beat], silent: dict[int, Beat] | None = None) -> str:
    silent = silent or {}
    return judge(result, set(silent), silent, "rank {}".format, LIMIT)


def test_who_waits_for_others_is_not_to_blame() -> None:
    result = {0: Beat(5, "training", 3.0, waits=True), 1: Beat(5, "data", 3.1, point="loader.py:9 in batch")}
    assert said(result) == f"rank 1 did not come within {LIMIT} seconds: rank 1 is in step 5 (data) for 3.1 s, " + (
        "loader.py:9 in batch"
    )


def test_of_those_that_wait_for_nobody_the_last_is_to_blame() -> None:
    result = {0: Beat(6, "training", 3.0), 1: Beat(5, "training", 3.1), 2: Beat(6, "data", 3.1)}
    assert said(result).startswith(f"rank 1 did not come within {LIMIT} seconds: rank 1 is in step 5")


def test_where_all_wait_the_one_that_is_behind_is_named_or_else_all() -> None:
    wait = Beat(6, "training", 3.0, waits=True)
    assert said({0: wait, 1: Beat(5, "training", 3.0, waits=True)}).startswith("rank 1 did not come")
    assert said({0: wait, 1: wait}).startswith("all ranks wait for each other")


def on_device(**queued: tuple[str, int, int]) -> Beat:
    """Answer of a rank whose host waits for its device."""
    return Beat(6, "training", 3.0, waits=True, queued={name: Queued(*entry) for name, entry in queued.items()})


def test_where_all_wait_for_devices_the_rank_without_the_collective_of_the_others_is_named() -> None:
    waiting, late = on_device(a=("all_reduce", 9, 8)), on_device(a=("all_gather", 8, 8))
    assert said({0: waiting, 1: late, 2: waiting}) == (
        f"rank 1 did not come within {LIMIT} seconds: rank 1 has not queued all_reduce, number 9 of communicator a, "
        "in which the device of rank 0, 2 waits"
    )


def test_a_rank_that_lacks_a_collective_as_it_waits_in_another_is_not_to_blame() -> None:
    waits_for_1 = on_device(a=("all_reduce", 9, 8))
    between = on_device(a=("all_reduce", 8, 8), b=("all_gather", 5, 4))
    late = on_device(b=("all_gather", 4, 4))
    assert said({0: waits_for_1, 1: between, 2: late}).startswith("rank 2 did not come")
    circle = {0: waits_for_1, 1: between, 2: on_device(b=("all_gather", 4, 4), c=("all_reduce", 2, 1))}
    assert said(circle).startswith("rank 1, rank 2 did not come")


def test_devices_that_are_equally_far_blame_nobody_and_neither_does_a_collective_that_is_done() -> None:
    waiting = on_device(a=("all_reduce", 9, 8))
    assert said({0: waiting, 1: waiting}).startswith("all ranks wait for each other")
    done = on_device(a=("all_reduce", 9, 9))
    assert said({0: done, 1: on_device(a=("all_reduce", 8, 8))}).startswith("all ranks wait for each other")


def test_silence_is_blamed_before_everything_else() -> None:
    result = {0: Beat(5, "data", 3.0)}
    assert said(result, {1: Beat(7, "training", 0.5)}) == (
        f"rank 1 did not come within {LIMIT} seconds and gives no sign of life: the process is stopped, or something "
        "holds Python's lock; rank 1 was last in step 7 (training) for 0.5 s"
    )


def test_a_host_is_named_where_the_run_has_several() -> None:
    wait = Beat(6, "training", 3.0, waits=True, host="trn-1")
    late = Beat(6, "data", 3.0, host="trn-2")
    assert said({0: wait, 1: late}).startswith(f"rank 1 (trn-2) did not come within {LIMIT} seconds: ")
    assert said({0: wait}, {1: late}).startswith(
        f"rank 1 (trn-2) did not come within {LIMIT} seconds and gives no sign"
    )
    assert said({0: wait, 1: Beat(6, "data", 3.0, host="trn-1")}).startswith(f"rank 1 did not come within {LIMIT}")
    many = {rank: Beat(5, "data", 3.0, host=f"trn-{rank // 8}") for rank in range(16)}
    assert said({16: wait, **many}).startswith(f"ranks 0-15 (trn-0, trn-1) did not come within {LIMIT} seconds: ")


def test_many_are_told_in_short() -> None:
    result = {rank: Beat(5, "training", 3.0, waits=True) for rank in range(100, 4096)}
    message = said(result, {rank: Beat(4, "data", 1.0) for rank in range(100)})
    assert message.startswith("ranks 0-99 did not come")
    assert message.count("was last in") == 4


def frame_of(work: Callable[[], object]) -> tuple[bool, str]:
    """Position of a thread during some work: waiting or not, and the line of code."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    frame = sys._current_frames()[thread.ident or 0]
    return waits(frame), point(frame)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_rank_at_the_gate_waits_for_others_and_one_at_another_lock_does_not(frozen: bool) -> None:
    gate, event = StepGate(), threading.Event()
    gate.freeze()
    waiting, frame = frame_of(lambda: gate.stops(1) if frozen else event.wait())
    assert waiting == frozen
    assert "threading.py" in frame
    event.set()
    gate.decide(1)
