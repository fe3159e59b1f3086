"""Ranks that do not meet, or meet with other settings."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Op, Pending
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Axis
from nxtrain.config.load import load
from nxtrain.launch.debug import debug_variables
from tests.support import command_ranks
from tests.support.command_ranks import WORLD, Ranks
from tests.support.commands import ended, start_rank, write_config
from tests.support.processes import free_port
from tests.support.runs import course, records

LIMIT_S = 3.0
ENDS_S = 6.0
"""Until a process has ended: the limit, the way to it, and what is looked up for the message, on a busy machine."""

WAY_OUT = "MASTER_ADDR must be an address of the first machine that all others reach, and MASTER_PORT a free port"


LIMIT = f"recovery.hang_timeout_s={LIMIT_S}"


def rank(folder: Path, number: int, port: int, *, world: int = 2, host: str = "127.0.0.1") -> BaseProcess:
    """Start one rank of the run of a folder."""
    return start_rank(folder, number, port, LIMIT, world=world, host=host)


def assert_refused(folder: Path, processes: dict[int, BaseProcess], *says: str) -> None:
    output = ended(folder, processes, LIMIT_S + ENDS_S)
    for number, process in processes.items():
        assert process.exitcode == BackendError.exit_code, output
        assert all(word in output[number] for word in says), output
        assert f"error: rank {number}: " in output[number]
        assert "Traceback" not in output[number]


def test_a_port_that_something_else_has_is_named_by_all_though_that_says_nothing(tmp_path: Path) -> None:
    write_config(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        first, second = rank(tmp_path, 0, port), rank(tmp_path, 1, port)
        output = ended(tmp_path, {0: first, 1: second}, LIMIT_S + ENDS_S)
    assert (first.exitcode, second.exitcode) == (BackendError.exit_code,) * 2, output
    assert f"port {port} is in use on this machine" in output[0]
    assert "something listens there that is not a store of torch" in output[1]
    assert WAY_OUT in output[0]
    assert WAY_OUT in output[1]


def test_a_name_that_does_not_resolve_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    says = ("the name no-such-host.invalid does not resolve on this machine", WAY_OUT)
    assert_refused(tmp_path, {1: rank(tmp_path, 1, free_port(), host="no-such-host.invalid")}, *says)


def test_a_first_rank_that_never_comes_is_told(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert_refused(tmp_path, {1: rank(tmp_path, 1, free_port())}, "nobody listens there", WAY_OUT)


def test_a_rank_of_another_world_ends_all_at_once(tmp_path: Path) -> None:
    write_config(tmp_path)
    port = free_port()
    processes = {0: rank(tmp_path, 0, port, world=3), 1: rank(tmp_path, 1, port, world=2)}
    assert_refused(tmp_path, processes, "WORLD_SIZE=", "all ranks need the same", "--nproc-per-node")


def test_a_first_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    write_config(tmp_path, steps=3)
    port = free_port()
    second = rank(tmp_path, 1, port)
    time.sleep(LIMIT_S / 2)  # the rest is for the start of the process, on a busy machine
    first = rank(tmp_path, 0, port)
    output = ended(tmp_path, {0: first, 1: second}, 30.0)
    assert (first.exitcode, second.exitcode) == (0, 0), output
    assert [record["step"] for record in course(tmp_path / "run")] == [1, 2, 3]


STEP = 3
"""Step at which the second rank issues another collective."""

FINGERPRINT = re.compile(
    r"Rank (\d) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+, OpType=(\w+), "
    r"TensorShape=\[([\d, ]+)\]"
)
"""Collective of a rank in the error of torch's process group wrapper."""


def debugged(config: Path) -> None:
    """Be a rank with the environment of the launcher."""
    variables = debug_variables(load(config, ()).config, {}, neuron=False)
    os.environ.update({variable.name: variable.value for variable in variables})
    dist.set_debug_level_from_env()  # torch read the environment as these processes imported it


def differ(config: Path, kind: str) -> None:
    """Be a rank with debugging; the second rank issues another collective in a step."""
    debugged(config)
    if os.environ["RANK"] == "1":
        C10dCollectives.start_all_reduce = other(kind, config)  # type: ignore[method-assign]


def other(kind: str, config: Path) -> Callable[..., Pending[Tensor]]:
    """All-reduce that becomes another collective once the metrics have `STEP` - 1 steps."""
    right = C10dCollectives.start_all_reduce

    def start(self: C10dCollectives, x: Tensor, axis: Axis, op: Op = "sum") -> Pending[Tensor]:
        file = config.parent / "run" / "metrics.jsonl"
        if axis.size == 1 or not file.exists() or file.read_text().count("\n") < STEP - 1:
            return right(self, x, axis, op)
        if kind == "shape":
            return right(self, x.flatten()[:-1].contiguous(), axis, op)
        return self.start_all_gather(x.flatten(), axis)

    return start


@pytest.mark.parametrize(("kind", "op"), [("shape", "ALLREDUCE"), ("operation", "_ALLGATHER_BASE")])
def test_another_collective_of_a_rank_is_named_with_both_ranks_and_what_each_issued(
    started_by: ForkServerContext, tmp_path: Path, kind: str, op: str
) -> None:
    config = command_ranks.write_config(tmp_path, backend={"cpu_transport": "gloo"}, recovery={"debug": "dist"})
    with Ranks(started_by, tmp_path, first=partial(differ, config, kind)) as ranks:
        codes, said = ranks.ended(), ranks.said()
    assert set(codes.values()) == {1}, said
    for rank in range(WORLD):
        issued = {int(result[1]): (result[2], result[3]) for result in FINGERPRINT.finditer(said[rank])}
        assert set(issued) == {0, 1}, said[rank]
        assert (issued[0][0], issued[1][0]) == ("ALLREDUCE", op)
        assert issued[0] != issued[1]
    assert len(records(tmp_path / "run")) >= STEP - 1
