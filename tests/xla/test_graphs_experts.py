"""Graphs of models with experts, as the command reports them: equal on all ranks, whatever a router chooses."""

from __future__ import annotations

import json

import pytest

from tests.support.commands import in_process
from tests.support.published import CONFIGS

MODEL = ("model.family=qwen3_moe", "model.preset=tiny", "backend.name=xla", "train.micro_batch=2")


@pytest.mark.parametrize(("pp", "dispatch"), [(1, "capacity"), (2, "dropless")])
def test_ranks_of_a_model_with_experts_record_the_same_graphs(pp: int, dispatch: str) -> None:
    """The statistics of the routers travel with the hidden state, and are summed once for a micro-batch."""
    layout = ("parallel.tp=2", f"parallel.pp={pp}", "parallel.shard=zero1", f"model.moe_dispatch={dispatch}")
    argv = ("--world", "8", "--steps", "1", "--json", *MODEL, *layout)
    code, out, err = in_process("graphs", CONFIGS / "tiny_cpu.toml", *argv)
    assert code == 0, err
    result = json.loads(out)
    assert result["problems"] == result["host_reads"] == []
    names = {graph["name"]: graph for graph in result["graphs"]}
    last = "steady micro-batch" if pp == 1 else "stage 1 forward"
    (summed,) = [row for row in names[last]["collectives"] if row["axis"] == "dp"]
    numbers = 2 * 8 + 5  # of 8 experts; torch-xla orders collectives by a further number
    assert (summed["op"], summed["count"], summed["bytes"]) == ("all-reduce", 1, 4 * (numbers + 1))
    transfers = {name for name in names if name.startswith("transfer")}
    assert transfers == ({"transfer over pp", "transfer over pp of the routing"} if pp == 2 else set())
