"""Graphs of divided experts, as the command reports them: equal on all ranks, with collectives of known axes."""

from __future__ import annotations

import json

import pytest

from tests.support.commands import in_process
from tests.support.published import CONFIGS

LAYOUT = (
    "parallel.tp=2",
    "parallel.ep=2",
    "train.micro_batch=1",
    "train.global_batch=8",
    "backend.name=xla",
    "model.family=mixtral",
    "model.preset=tiny",
)


@pytest.mark.parametrize(("shard", "dispatch", "optim"), [("none", "dropless", "adamw"), ("zero1", "capacity", "muon")])
def test_ranks_with_other_experts_record_one_graph(shard: str, dispatch: str, optim: str) -> None:
    options = (*LAYOUT, f"model.moe_dispatch={dispatch}", f"parallel.shard={shard}", f"optim.name={optim}")
    code, out, err = in_process("graphs", CONFIGS / "tiny_cpu.toml", "--world", "8", "--steps", "1", "--json", *options)
    assert code == 0, err
    result = json.loads(out)
    assert result["problems"] == []
    (micro,) = [graph for graph in result["graphs"] if graph["name"] == "steady micro-batch"]
    (update,) = [graph for graph in result["graphs"] if graph["name"] == "steady update"]
    # Two blocks: rows and their weights go to the experts, and outputs back, and so do the gradients. Whole tokens have
    # the numbers of their experts with them.
    rows = [row for row in micro["collectives"] if row["axis"] == "ep"]
    calls = 2 * (7 if dispatch == "dropless" else 6)
    assert [(row["op"], row["count"], row["group_size"]) for row in rows] == [("all-to-all", calls, 2)]
    axes = {row["axis"] for row in update["collectives"]}
    assert ("expert_shardxtp" in axes) == (optim == "muon"), "whole matrices of the experts that ranks share"
    if shard == "none":
        assert {"expert_copies", "ppxepxtp"} <= axes
    else:
        assert {"expert_copies", "ppxshardxtp"} <= axes
    assert update["dp_scale"] == pytest.approx(1 / 4)
