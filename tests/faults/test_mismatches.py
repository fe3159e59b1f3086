"""Ranks that issue different collectives: under `recovery.debug=dist` each is named, with its operation and shape."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Op, Pending
from nxtrain.common.mesh import Axis
from nxtrain.config.load import load
from nxtrain.launch.debug import debug_variables
from tests.support.command_ranks import WORLD, Ranks, write_config
from tests.support.runs import records

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
    config = write_config(tmp_path, backend={"cpu_transport": "gloo"}, recovery={"debug": "dist"})
    with Ranks(started_by, tmp_path, first=partial(differ, config, kind)) as ranks:
        codes, said = ranks.ended(), ranks.said()
    assert set(codes.values()) == {1}, said
    for rank in range(WORLD):
        issued = {int(found[1]): (found[2], found[3]) for found in FINGERPRINT.finditer(said[rank])}
        assert set(issued) == {0, 1}, said[rank]
        assert (issued[0][0], issued[1][0]) == ("ALLREDUCE", op)
        assert issued[0] != issued[1]
    assert len(records(tmp_path / "run")) >= STEP - 1
