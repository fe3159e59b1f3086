"""Graphs of context parallelism, as the command reports them: equal on all ranks, with collectives of known axes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import output_of
from tests.support.published import CONFIGS

LAYOUT = ("parallel.tp=2", "parallel.cp=2", "parallel.shard=zero1", "train.micro_batch=4", "backend.name=xla")


@pytest.mark.parametrize("documents", ["true", "false"])
def test_ranks_of_cp_record_one_graph_and_the_report_names_their_collectives(documents: str) -> None:
    argv = ("--world", "8", "--steps", "1", "--json", *LAYOUT, f"data.doc_mask={documents}")
    out = output_of("graphs", CONFIGS / "tiny_cpu.toml", *argv)
    result = json.loads(out)
    assert result["problems"] == []
    assert {0, 1, 2, 3, 4} <= set(result["ranks"])
    (micro,) = [graph for graph in result["graphs"] if graph["name"] == "steady micro-batch"]
    (update,) = [graph for graph in result["graphs"] if graph["name"] == "steady update"]
    # Two blocks: keys and values are gathered in both passes, and their gradients are scattered once.
    counts = {row["op"]: row["count"] for row in micro["collectives"] if row["axis"] == "cp"}
    assert counts == {"all-gather": 4, "reduce-scatter": 2}
    assert {row["axis"] for row in update["collectives"]} == {"dpxcp", "ppxshardxtp"}
    assert update["dp_scale"] == pytest.approx(1 / 4)


@pytest.mark.slow
def test_each_layer_adds_the_same_collectives_over_cp(tmp_path: Path) -> None:
    """A trace of few layers shows what all layers do, as docs/graphs.md says of long rows."""
    lines = []
    for layers in (1, 3):
        hlo = tmp_path / str(layers)
        argv = ("--world", "8", "--rank", "0", "--steps", "1", "--json", "--hlo", hlo, *LAYOUT, "train.remat=full")
        out = output_of("graphs", CONFIGS / "tiny_cpu.toml", *argv, f"model.config.num_hidden_layers={layers}")
        (micro,) = [graph for graph in json.loads(out)["graphs"] if graph["name"] == "steady micro-batch"]
        counts = {row["op"]: row["count"] for row in micro["collectives"] if row["axis"] == "cp"}
        assert counts == {"all-gather": 3 * layers, "reduce-scatter": layers}
        lines.append(Path(micro["hlo"]).read_text(encoding="utf-8").count("\n"))
    assert lines[1] > lines[0]
