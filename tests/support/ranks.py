"""Run a function on several ranks, each in a process that stays alive between tests.

Importing torch takes seconds of processor time, so one process imports everything and the ranks are forks of it. They
are started once per test session; each run joins them in a new process group, and leaves it.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from tests.support import processes
from tests.support.processes import AGENT_STORE, patient_s, rank_variables


class _Pickler(ForkingPickler):
    """Pickler that writes a plain tensor as the bytes of its elements, in row-major order."""

    def reducer_override(self, x: Any) -> Any:
        """Function and arguments that make the object again; tensors alone have others than usual."""
        if type(x) is not Tensor or x.device.type != "cpu" or x.layout is not torch.strided or not x.is_leaf:
            return NotImplemented
        elements = x.detach().resolve_conj().resolve_neg().contiguous()
        flat = elements.as_strided((elements.numel(),), (1,))  # `view` keeps any stride of a single element
        bytes_ = bytearray(flat.view(torch.uint8).numpy())
        return _tensor, (bytes_, x.dtype, x.shape, x.requires_grad)


def _tensor(elements: bytearray, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> Tensor:
    flat = torch.frombuffer(elements, dtype=dtype) if elements else torch.empty(0, dtype=dtype)
    return flat.view(shape).requires_grad_(requires_grad)


def dumps(message: object) -> bytes:
    """Bytes of a message, for `pickle.loads` of another process."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(message)
    return file.getvalue()


TIMEOUT_S = patient_s(120)
HOST = "127.0.0.1"

PRELOADED = (
    "tests.support.run_folders",
    "tests.support.parity",
    "tests.support.runs",
    "nxtrain_models.decoder.model",
    "nxtrain_models.llama",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.placement_types",
    "torch._dynamo.testing",
    "torch._inductor.compile_fx",  # what compiles blocks imports it, in seconds of each rank
    "torch.distributed.run",
)
"""Modules that the forked process imports: with them comes nearly all that bodies use."""


class RankPool:
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
        workers = self._workers[:world]
        store = open_store()
        job = dumps((world, store.port, body, args))
        for rank, (_, pipe) in enumerate(workers):
            pipe.send(rank)
            pipe.send_bytes(job)
        outcomes = [_outcome(pipe) for _, pipe in workers]
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(outcomes) if not ok]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [value for _, value in outcomes]

    def close(self) -> None:
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


def context() -> ForkServerContext:
    """Starts processes that have imported what bodies use."""
    return processes.context(*PRELOADED)


def open_store() -> TCPStore:
    """The store in which the ranks of a run meet, kept by this process as by torchrun's agent.

    The store listens before the ranks ask for it, on a port that no other process can take in between. Its socket is
    one of IPv4 alone: of a client that comes through a socket of both kinds, torch asks a name server for the name of
    ::ffff:127.0.0.1, which /etc/hosts lacks, and all clients wait for the answer, at times for five seconds.
    """
    listener = socket.create_server((HOST, 0), backlog=64)
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _outcome(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes()) if pipe.poll(TIMEOUT_S) else (False, "hung")
    except EOFError:
        return False, "died"


def _start(*job: Any) -> tuple[Any, Connection]:
    started_by = context()
    here, there = started_by.Pipe()
    process = started_by.Process(target=_serve, args=(there, *job), daemon=True)
    process.start()
    return process, here


def _serve(pipe: Connection, name: str, layers: str, prepare: Callable[[], None] | None) -> None:
    import torch

    if prepare is not None:
        prepare()
    torch.set_num_threads(1)
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # after one lost answer torch asks no name server any more
    while True:
        rank = pipe.recv()
        world, port, body, args = pickle.loads(pipe.recv_bytes())
        os.environ.update({**rank_variables(rank, world, port), **AGENT_STORE})
        from nxtrain.backends import open_backend

        try:
            backend = open_backend(name, layers=layers)
            try:
                pipe.send_bytes(dumps((True, body(backend, *args))))
            finally:
                backend.close()
        except BaseException:
            pipe.send_bytes(dumps((False, traceback.format_exc())))
