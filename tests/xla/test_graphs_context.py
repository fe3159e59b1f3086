"""Graphs of context parallelism, as the command reports them: equal on all ranks, with collectives of known axes."""

from __future__ import annotations

import json

import pytest

from tests.support.commands import output_of
from tests.support.published import CONFIGS

LAYOUT = ("parallel.tp=2", "parallel.cp=2", "parallel.shard=zero1", "train.micro_batch=4", "backend.name=xla")


@pytest.mark.parametrize("documents", ["true", "false"])
def test_ranks_of_cp_record_one_graph_and_the_report_names_their_collectives(documents: str) -> None:
    argv = ("--world", "8", "--steps", "1", "--json", *LAYOUT, f"data.doc_mask={documents}")
    out = output_of("graphs", CONFIGS / "tiny_cpu.toml", *argv)
    found = json.loads(out)
    assert found["problems"] == []
    assert {0, 1, 2, 3, 4} <= set(found["ranks"])
    (micro,) = [graph for graph in found["graphs"] if graph["name"] == "steady micro-batch"]
    (update,) = [graph for graph in found["graphs"] if graph["name"] == "steady update"]
    # Two blocks: keys and values are gathered in both passes, and their gradients are scattered once.
    counts = {row["op"]: row["count"] for row in micro["collectives"] if row["axis"] == "cp"}
    assert counts == {"all-gather": 4, "reduce-scatter": 2}
    assert {row["axis"] for row in update["collectives"]} == {"dpxcp", "ppxshardxtp"}
    assert update["dp_scale"] == pytest.approx(1 / 4)
