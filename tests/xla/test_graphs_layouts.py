"""Graphs of cp and of experts, as the command reports them: equal on all ranks, with collectives of known axes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import in_process
from tests.support.drawn import one_in
from tests.support.processes import patient_s
from tests.support.published import CONFIGS
from tests.support.xla_processes import nxtrain

CONTEXT = ("parallel.tp=2", "parallel.cp=2", "parallel.shard=zero1", "train.micro_batch=4")
DIVIDED = ("model.family=mixtral", "model.preset=tiny", "parallel.tp=2", "parallel.ep=2", "train.micro_batch=1")
ROUTED = ("model.family=qwen3_moe", "model.preset=tiny", "parallel.tp=2", "parallel.shard=zero1", "train.micro_batch=2")

Report = tuple[dict[str, Any], dict[str, dict[str, Any]]]


def report(folder: Path, *words: object) -> Report:
    """The report of a step without problems, and its graphs by name; the command and its tracing process are forks."""
    argv = ("--world", "8", "--steps", "1", "--json", "backend.name=xla", *words)
    done = nxtrain("graphs", CONFIGS / "tiny_cpu.toml", *argv, env=os.environ, log=folder / "log.txt").ended(
        patient_s(400)
    )
    assert done.code == 0, done.printed[-3000:]
    result = json.loads(done.printed[done.printed.index("{\n") :])  # after the progress
    assert result["problems"] == result["host_reads"] == []
    return result, {graph["name"]: graph for graph in result["graphs"]}


def over(graph: dict[str, Any], axis: str) -> dict[str, int]:
    """Number of each collective over an axis."""
    return {row["op"]: row["count"] for row in graph["collectives"] if row["axis"] == axis}


def axes(graph: dict[str, Any]) -> set[str]:
    return {row["axis"] for row in graph["collectives"]}


@pytest.mark.parametrize("documents", one_in(2, ["true", "false"]))
def test_ranks_of_cp_record_one_graph_and_the_report_names_their_collectives(documents: str, tmp_path: Path) -> None:
    result, graphs = report(tmp_path, *CONTEXT, f"data.doc_mask={documents}")
    assert {0, 1, 2, 3, 4} <= set(result["ranks"])
    # Two blocks: keys and values are gathered in both passes, and their gradients are scattered once.
    assert over(graphs["steady micro-batch"], "cp") == {"all-gather": 4, "reduce-scatter": 2}
    assert axes(graphs["steady update"]) == {"dpxcp", "ppxshardxtp"}
    assert graphs["steady update"]["dp_scale"] == pytest.approx(1 / 4)


@pytest.mark.slow
def test_each_layer_adds_the_same_collectives_over_cp(tmp_path: Path) -> None:
    """A trace of few layers shows what all layers do, as docs/graphs.md says of long rows."""
    lines = []
    for layers in (1, 3):
        hlo = ("--rank", "0", "--hlo", tmp_path / str(layers))
        _, graphs = report(tmp_path, *hlo, *CONTEXT, "train.remat=full", f"model.config.num_hidden_layers={layers}")
        micro = graphs["steady micro-batch"]
        assert over(micro, "cp") == {"all-gather": 3 * layers, "reduce-scatter": layers}
        lines.append(Path(micro["hlo"]).read_text(encoding="utf-8").count("\n"))
    assert lines[1] > lines[0]


@pytest.mark.parametrize(
    ("shard", "dispatch", "optim"), one_in(2, [("zero1", "capacity", "muon"), ("none", "dropless", "adamw")])
)
def test_ranks_with_other_experts_record_one_graph(shard: str, dispatch: str, optim: str, tmp_path: Path) -> None:
    options = (f"model.moe_dispatch={dispatch}", f"parallel.shard={shard}", f"optim.name={optim}")
    _, graphs = report(tmp_path, *DIVIDED, "train.global_batch=8", *options)
    # Two blocks: rows and their weights go to the experts, and outputs back, and so do the gradients. Whole tokens have
    # the numbers of their experts with them.
    rows = [row for row in graphs["steady micro-batch"]["collectives"] if row["axis"] == "ep"]
    calls = 2 * (7 if dispatch == "dropless" else 6)
    assert [(row["op"], row["count"], row["group_size"]) for row in rows] == [("all-to-all", calls, 2)]
    update = graphs["steady update"]
    assert ("expert_shardxtp" in axes(update)) == (optim == "muon"), "whole matrices of the experts that ranks share"
    assert {"expert_copies", "ppxepxtp" if shard == "none" else "ppxshardxtp"} <= axes(update)
    assert update["dp_scale"] == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("pp", "dispatch", "family"),
    one_in(2, [(1, "capacity", "qwen3_moe"), (1, "dropless", "gpt_oss"), (2, "dropless", "qwen3_moe")]),
)
def test_ranks_of_a_model_with_experts_record_the_same_graphs(
    pp: int, dispatch: str, family: str, tmp_path: Path
) -> None:
    """The statistics of the routers travel with the hidden state, and are summed once for a micro-batch."""
    options = (f"parallel.pp={pp}", f"model.moe_dispatch={dispatch}", f"model.family={family}")
    _, graphs = report(tmp_path, *ROUTED, *options)
    last = "steady micro-batch" if pp == 1 else "stage 1 forward"
    (summed,) = [row for row in graphs[last]["collectives"] if row["axis"] == "dp"]
    numbers = 2 * 8 + 5  # of 8 experts; torch-xla orders collectives by a further number
    assert (summed["op"], summed["count"], summed["bytes"]) == ("all-reduce", 1, 4 * (numbers + 1))
    transfers = {name for name in graphs if name.startswith("transfer")}
    assert transfers == ({"transfer over pp", "transfer over pp of the routing"} if pp == 2 else set())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "world", "layers", "graph", "axis", "wanted"),
    [
        ("qwen3_30b_a3b_trn2", 64, 1, "steady micro-batch", "dp", {"all-to-all": 9}),
        ("llama3_70b_32k_trn1", 2048, 8, "stage 0 backward", "cp", {"all-gather": 2, "reduce-scatter": 1}),
    ],
)
def test_ranks_of_a_recipe_record_the_same_graphs(  # 6 arguments: a recipe, its ranks, and a graph
    recipe: str, world: int, layers: int, graph: str, axis: str, wanted: dict[str, int]
) -> None:
    """At true width, with a layer on a stage: experts over the ranks of dp, and keys over those of cp."""
    ranks = ("--rank", "0", "--rank", str(world // 2 + 1))
    options = ("--world", str(world), *ranks, "--steps", "1", "--json", f"model.config.num_hidden_layers={layers}")
    code, out, err = in_process("graphs", CONFIGS / f"{recipe}.toml", *options)
    assert code == 0, err
    result = json.loads(out)
    assert result["problems"] == result["host_reads"] == []
    (traced,) = [one for one in result["graphs"] if one["name"] == graph]
    assert over(traced, axis) == wanted
