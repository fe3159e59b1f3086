"""Ranks of several machines find each other at every start, though their agents count the starts differently."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from nxtrain.backends.xla.world import open_store
from nxtrain.common.errors import HangError
from tests.support.ranks import context


def play(pipe: Connection, environ: dict[str, str], number: int, start: str) -> None:
    """Meet the other rank, and send what both wrote; the store of rank 0 serves the other until the test ends."""
    store = open_store(environ, number, 20.0)
    store.set(f"rank {number}", start)
    store.wait([f"rank {other}" for other in range(2)])
    pipe.send(" ".join(store.get(f"rank {other}").decode() for other in range(2)))
    pipe.recv()


class Rank:
    """A process that is a rank of a start, under an agent that counts the restarts in its own way."""

    def __init__(self, agents: dict[str, str], number: int, start: str, restarts: int) -> None:
        environ = {**os.environ, **agents, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        started_by = context()
        self._pipe, there = started_by.Pipe()
        self._process = started_by.Process(target=play, args=(there, environ, number, start), daemon=True)
        self._process.start()

    def met(self) -> str:
        assert self._pipe.poll(60), "met nobody"
        result: str = self._pipe.recv()
        return result

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture
def agents() -> Iterator[dict[str, str]]:
    """The variables that name the store of the agents, which lives for all starts of a run."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    del store


def test_ranks_of_a_start_meet_each_other_and_none_of_an_earlier_one(agents: dict[str, str]) -> None:
    first = [Rank(agents, number, "first", restarts=0) for number in (0, 1)]
    assert [rank.met() for rank in first] == ["first first"] * 2
    for rank in first:
        rank.end()
    late = Rank(agents, 1, "second", restarts=0)  # the ranks of the other machine have failed
    time.sleep(3)
    again = Rank(agents, 0, "second", restarts=1)
    assert [rank.met() for rank in (late, again)] == ["second second"] * 2
    for rank in (late, again):
        rank.end()


def test_a_first_rank_that_never_comes_is_named(agents: dict[str, str]) -> None:
    began = time.monotonic()
    with pytest.raises(HangError, match=r"rank 0 did not open a store on localhost .*hang_timeout_s=1 seconds"):
        open_store(agents, 1, 1.0)
    assert timedelta(seconds=time.monotonic() - began) < timedelta(seconds=10)
