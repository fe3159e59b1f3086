"""`nxtrain graphs` of pipelines: each stage has graphs of its own, which its ranks share, and some join them all."""

from __future__ import annotations

from typing import Any

import pytest

from nxtrain.tools.trace.command import some_ranks
from tests.support.graph_mutants import traced
from tests.support.models import changed
from tests.support.parity import layout
from tests.support.xla_engine import run_devices

WORLD = 16
"""tp 2, pp 4 and dp 2."""

RANKS = [0, 3, 4, 7, 8, 12, 15]
"""Some of each stage."""

STAGES = [3, 4, 8, 15]
"""One of each stage: enough for the graphs of stages, where ranks of one stage are not in question."""


def plan(num_micro: int, virtual_pp: int = 1, shape: str = "gqa2", family: str = "llama") -> Any:
    options: dict[str, Any] = {"tp": 2, "pp": 4, "dp": 2, "virtual_pp": virtual_pp, "shard": "zero1"}
    layers = {"num_hidden_layers": 4 * virtual_pp}
    if shape == "copies":  # of the embedding over the stages, of K/V heads over tp
        shape, layers["num_key_value_heads"] = "tied", 1
    small = layout(shape, **options, sp=True, batch=2 * num_micro, micro=1, config=layers, family=family)
    return changed(small, train={"eval_every": 2, "eval_batches": 1})


CASES: dict[str, tuple[Any, str, list[int]]] = {
    "2": (plan(2), "", RANKS),
    "3": (plan(3), "", STAGES),
    "chunks, 2": (plan(2, virtual_pp=2, family="qwen3"), "", RANKS),
    "chunks, 3": (plan(3, virtual_pp=2, family="qwen3"), "", STAGES),
    "tied": (plan(2, shape="tied"), "", STAGES),
    "vote": (changed(plan(1, shape="copies", family="qwen2"), recovery={"vote_every": 2}), "", RANKS),
    "number": (plan(2), "stage", [4, 7]),
    "sum": (plan(2), "sum of a stage", STAGES),
    "joined": (plan(2), "joined", STAGES),
}
"""Run, defect and traced ranks of each case; "vote" has a tied embedding, too."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of two steps; a minute in all at most."""
    (result,) = run_devices(1, traced, WORLD, list(CASES.values()), folder=tmp_path_factory.mktemp("graphs"))
    return dict(zip(CASES, result, strict=True))


def test_ranks_of_every_stage_are_traced() -> None:
    assert some_ranks(plan(2), WORLD) == [0, 1, 2, 3, 4, 7, 8, 9, 11, 12, 15]


@pytest.mark.parametrize("case", ["2", "3", "chunks, 2", "chunks, 3", "tied", "vote"])
def test_a_sound_pipeline_has_no_problem(case: str, reports: dict[str, dict[str, Any]]) -> None:
    result = reports[case]
    assert (result["problems"], result["host_reads"], result["stages"]) == ([], [], 4)
    assert {graph["dp_scale"] for graph in result["graphs"]} == {0.5, None}
    assert len({graph["name"] for graph in result["graphs"]}) == result["distinct_graphs"] == len(result["graphs"])
    for graph in result["graphs"]:
        axes = {row["axis"] for row in graph["collectives"]}
        assert graph["stages"] == sorted({rank // 4 for rank in graph["ranks"]})
        assert not graph["name"].startswith("stage") or axes <= {"tp", "dp"}


def test_the_graphs_are_named_after_stages_and_what_they_do_there(reports: dict[str, dict[str, Any]]) -> None:
    stages = {graph["name"]: graph["stages"] for graph in reports["3"]["graphs"]}
    for name, on in {
        "stage 0 forward": [0],
        "stages 1-2 forward": [1, 2],
        "stage 3 forward": [3],
        "stage 0 backward": [0],
        "stage 3 backward": [3],
        "transfer over pp:0-1": [0, 1, 2, 3],
        "transfer over pp:1-2": [1, 2],
        "sum over ppxdp": [0, 1, 2, 3],
        "sum over ppxshardxtp": [0, 1, 2, 3],
        "stages 1-2 update": [1, 2],
        "stage 3 evaluation forward": [3],
    }.items():
        assert stages[name] == on


def test_both_chunks_are_there(reports: dict[str, dict[str, Any]]) -> None:
    uses = {use for graph in reports["chunks, 3"]["graphs"] for use in graph["name"].split(", ")}
    assert {f"stage 0 {way} chunk 0" for way in ("forward", "backward", "evaluation forward")} <= uses
    assert {f"stage 3 {way} chunk 1" for way in ("forward", "backward", "evaluation forward")} <= uses
    # The parts in between are alike, wherever they are.
    assert {f"stages 1-3 {way} chunk 0" for way in ("forward", "backward")} <= uses
    assert {f"stages 0-2 {way} chunk 1" for way in ("forward", "backward")} <= uses


@pytest.mark.parametrize(("few", "many"), [("2", "3"), ("chunks, 2", "chunks, 3")])
def test_more_micro_batches_are_no_more_graphs(few: str, many: str, reports: dict[str, dict[str, Any]]) -> None:
    fewer, more = ({graph["hash"]: graph["name"] for graph in reports[name]["graphs"]} for name in (few, many))
    assert fewer == more


def test_both_ends_of_a_tied_embedding_exchange_its_gradients(reports: dict[str, dict[str, Any]]) -> None:
    stages = {graph["name"]: graph["stages"] for graph in reports["tied"]["graphs"]}
    assert stages["exchange of the first and last stage"] == [0, 3]


def test_a_vote_is_the_same_graphs_on_all_ranks_of_a_stage_and_all_stages_meet(
    reports: dict[str, dict[str, Any]],
) -> None:
    """No problem is found in it, by the test above; the stages between the copies go without their exchange."""
    stages = {graph["name"]: graph["stages"] for graph in reports["vote"]["graphs"] if "vote" in graph["name"]}
    assert stages.pop("vote exchange of the first and last stage") == [0, 3]
    assert stages.pop("stages 1-2 vote") == [1, 2]
    assert {stage for result in stages.values() for stage in result} == {0, 3}
    others = {name for name in stages if "exchange" in name or "sum" in name}
    assert not others, "one exchange, and the sum is that of the gradient norm"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("number", "ranks 7 record other graphs than rank 4; the first difference is update in step 1"),
        ("sum", "sum over ppxshardxtp: is another graph on stages 1 than 0, 2-3"),
        ("joined", "stage 0 forward: a collective over pp:0-1 is in a graph that not all stages run"),
    ],
)
def test_a_defect_is_refused(case: str, words: str, reports: dict[str, dict[str, Any]]) -> None:
    assert any(words in problem for problem in reports[case]["problems"]), reports[case]["problems"]
