"""Ranks of several machines find each other at every start, though their agents count the starts differently."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from nxtrain.backends.xla.world import meet
from nxtrain.errors import HangError

RANK = """
import os, sys, time
from nxtrain.backends.xla.world import meet
rank, start = int(sys.argv[1]), sys.argv[2]
store = meet(os.environ, rank, 20.0)
store.set(f"rank {rank}", start)
store.wait([f"rank {other}" for other in range(2)])
print(*(store.get(f"rank {other}").decode() for other in range(2)), flush=True)
if rank == 0:
    sys.stdin.read()  # its store serves the others
"""


@pytest.fixture
def agents() -> Iterator[dict[str, str]]:
    """The variables that name the store of the agents, which lives for all starts of a run."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    del store


def rank(environ: dict[str, str], number: int, start: str, restarts: int) -> subprocess.Popen[str]:
    env = {**environ, "TORCHELASTIC_RESTART_COUNT": str(restarts), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    argv = [sys.executable, "-c", RANK, str(number), start]
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_ranks_of_a_start_meet_each_other_and_none_of_an_earlier_one(agents: dict[str, str]) -> None:
    environ = {**os.environ, **agents}
    first = [rank(environ, number, "first", restarts=0) for number in (0, 1)]
    assert first[1].communicate(timeout=60)[0] == "first first\n"
    assert first[0].communicate(timeout=60)[0] == "first first\n"
    late = rank(environ, 1, "second", restarts=0)  # the ranks of the other machine have failed
    time.sleep(3)
    again = rank(environ, 0, "second", restarts=1)
    assert late.communicate(timeout=60)[0] == "second second\n"
    assert again.communicate(timeout=60)[0] == "second second\n"


def test_a_first_rank_that_never_comes_is_named(agents: dict[str, str]) -> None:
    began = time.monotonic()
    with pytest.raises(HangError, match=r"rank 0 did not open a store on localhost .*hang_timeout_s=1 seconds"):
        meet(agents, 1, 1.0)
    assert timedelta(seconds=time.monotonic() - began) < timedelta(seconds=10)
