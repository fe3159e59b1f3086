"""Run a function on several ranks, each in a process that stays alive between tests.

Importing torch takes seconds, so the processes are started once per test session; each run joins them in a new process
group, and leaves it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.multiprocessing as mp

from tests.support.patience import patient_s
from tests.support.ports import free_port

TIMEOUT_S = patient_s(120)


class RankPool:
    """Processes that play ranks.

    Args:
        backend, layers: What each opens.
        prepare: What each calls first; importable from a fresh process.
    """

    def __init__(self, backend: str = "cpu", prepare: Callable[[], None] | None = None, layers: str = "native") -> None:
        self.layers = layers
        self._job = (backend, layers, prepare)
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `body(backend, *args)` on each rank of a world and return what each returned, by rank.

        `body` and its arguments must be importable from a fresh process. A rank that fails, dies or hangs fails the
        call, and the processes are replaced.
        """
        while len(self._workers) < world:
            self._workers.append(_start(*self._job))
        port = free_port()
        workers = self._workers[:world]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((rank, world, port, body, args))
        outcomes = [_outcome(pipe) for _, pipe in workers]
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(outcomes) if not ok]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [value for _, value in outcomes]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that play ranks, started once per lane that imports this."""
    pool = RankPool()
    yield pool
    pool.close()


def _outcome(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll(TIMEOUT_S) else (False, "hung")
    except EOFError:
        return False, "died"


def _start(*job: Any) -> tuple[Any, Connection]:
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, *job), daemon=True)
    process.start()
    return process, here


def _serve(pipe: Connection, name: str, layers: str, prepare: Callable[[], None] | None) -> None:
    import torch

    if prepare is not None:
        prepare()
    torch.set_num_threads(1)
    while True:
        rank, world, port, body, args = pipe.recv()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        os.environ.update({name: str(value) for name, value in place.items()})
        from nxtrain.backends import open_backend

        try:
            backend = open_backend(name, layers=layers)
            try:
                pipe.send((True, body(backend, *args)))
            finally:
                backend.close()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
