"""Report of `nxtrain graphs` on records: their names, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Mesh
from nxtrain.tools.trace.command import present, some_ranks
from nxtrain.tools.trace.hlo import Collective, HloGraph
from nxtrain.tools.trace.recording import EVALUATION, LOG, TRAINING, Cut, Read, Recording
from nxtrain.tools.trace.report import report
from tests.support.models import plan

MESH = Mesh.build(8, 0, tp=2)
MEAN = Collective("all-reduce", MESH.dp.groups, 64, frozenset({1 / 4}))
ENTER = Collective("all-gather", MESH.tp.groups, 16, frozenset())
PLAIN = HloGraph((), has_f64=False)


def recording(*cuts: tuple[int, int, str, str], **graphs: HloGraph) -> Recording:
    """Cuts are rank, step, phase and hash."""
    made = [Cut(*cut) for cut in cuts]
    ranks = list(dict.fromkeys(cut.rank for cut in made)) or [0]
    all_graphs = {cut.hash: PLAIN for cut in made} | graphs
    return Recording(8, ranks, 2, 4, [MESH.tp, MESH.dp], made, all_graphs, [])


def run(rank: int, *steps: Sequence[str]) -> list[tuple[int, int, str, str]]:
    """Hashes of each step, on one rank."""
    return [(rank, number, TRAINING, hash_) for number, step in enumerate(steps, start=1) for hash_ in step]


SOUND = recording(
    *run(0, "mmu", "mmu"),
    (0, 2, LOG, "l"),
    (0, 2, EVALUATION, "e"),
    *run(1, "mmu", "mmu"),
    (1, 2, LOG, "l"),
    (1, 2, EVALUATION, "e"),
    m=HloGraph((ENTER, ENTER), has_f64=False),
    u=HloGraph((MEAN,), has_f64=False),
)


def test_a_sound_record_names_each_graph_and_says_where_it_runs() -> None:
    result = report(SOUND)
    assert result["problems"] == []
    assert [(g["name"], g["hash"], g["steps"], g["ranks"], g["dp_scale"]) for g in result["graphs"]] == [
        ("steady micro-batch", "m", [1, 2], [0, 1], None),
        ("steady update", "u", [1, 2], [0, 1], 0.25),
        ("log", "l", [2], [0, 1], None),
        ("evaluation", "e", [2], [0, 1], None),
    ]
    assert (result["world"], result["rank"], result["steps"], result["distinct_graphs"]) == (8, 0, 2, 4)
    assert result["graphs"][0]["collectives"] == [
        {"op": "all-gather", "count": 2, "group_size": 2, "num_groups": 4, "bytes": 32, "axis": "tp"}
    ]


def test_a_step_of_one_graph_is_steady() -> None:
    assert [graph["name"] for graph in report(recording(*run(0, "s", "s")))["graphs"]] == ["steady"]


@pytest.mark.parametrize(
    ("steps", "names", "problem"),
    [
        (["a", "s"], ["first", "steady"], "steady: compiled again in step 2: 2 graphs"),
        (["s", "a", "s"], ["steady", "other steady"], "steady: compiled again in step 2: 2 graphs"),
        (["mau", "mau"], ["other steady micro-batch", "steady micro-batch", "steady update"], "in step 1, where one"),
        (["mmu", "mma"], ["steady micro-batch", "first update", "steady update"], "steady update: compiled again"),
    ],
)
def test_a_part_that_needs_two_graphs_is_refused(steps: list[str], names: list[str], problem: str) -> None:
    result = report(recording(*run(0, *steps)))
    assert [graph["name"] for graph in result["graphs"]] == names
    (line,) = result["problems"]
    assert problem in line


def test_ranks_that_need_other_graphs_are_refused() -> None:
    result = report(recording(*run(0, "s"), *run(1, "a"), *run(5, "s"), *run(7, "a")))
    (line,) = result["problems"]
    assert line.startswith("ranks 1, 7 record other graphs than rank 0; the first difference is steady in step 1")
    assert [(graph["hash"], graph["ranks"]) for graph in result["graphs"]] == [("s", [0, 5]), ("a", [1, 7])]


def test_a_rank_that_stops_early_is_refused() -> None:
    (line,) = report(recording(*run(0, "s", "s"), *run(1, "s")))["problems"]
    assert "some records fewer" in line


@pytest.mark.parametrize(
    "groups", [(), (tuple(range(8)),), ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1),)], ids=["none", "all", "halves", "own"]
)
def test_a_group_that_is_no_axis_is_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    graph = HloGraph((replace(ENTER, groups=groups),), has_f64=False)
    (line,) = report(recording(*run(0, "s"), s=graph))["problems"]
    assert "steady: 1 x all-gather over" in line
    assert line.endswith("not an axis of this mesh; its axes: tp of 2, dp of 4")


def test_an_exchange_inside_the_groups_of_an_axis_is_sound() -> None:
    within, across = ((0, 2), (2, 4), (1, 3)), ((0, 2), (2, 3))
    for pairs, count in ((within, 0), (across, 1)):
        graph = HloGraph((Collective("collective-permute", pairs, 8, frozenset()),), has_f64=False)
        assert len(report(recording(*run(0, "s"), s=graph))["problems"]) == count


def test_another_mean_than_over_dp_is_refused() -> None:
    graph = HloGraph((replace(MEAN, scales=frozenset({1 / 8})),), has_f64=False)
    result = report(recording(*run(0, "s"), s=graph))
    assert result["problems"] == ["steady: sums over dp are multiplied by 0.125; the mean of 4 ranks needs 0.25"]
    assert result["graphs"][0]["dp_scale"] == 1 / 8


def test_double_precision_is_refused() -> None:
    (line,) = report(recording(*run(0, "s"), s=HloGraph((), has_f64=True)))["problems"]
    assert line.startswith("steady: computes in float64")


def test_a_read_is_refused_once_with_its_place() -> None:
    reads = [Read(rank, step, "train/step.py", 7, "train_step") for rank in (0, 1) for step in (1, 2)]
    result = report(replace(recording(*run(0, "s"), *run(1, "s")), reads=reads))
    (line,) = result["problems"]
    assert line.startswith("train/step.py:7: train_step reads a value of the device")
    assert result["host_reads"][3] == {
        "rank": 1,
        "step": 2,
        "file": "train/step.py",
        "line": 7,
        "function": "train_step",
    }


@pytest.mark.parametrize("as_json", [True, False])
def test_a_report_is_printed_before_it_fails(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    extra: dict[str, Any] = {
        "notes": ["traced with backend.layers=native in place of nxd (auto)"],
        "seconds": [1.0, 0.5],
    }
    sound = report(SOUND) | extra
    present(sound, as_json=as_json)
    printed = capsys.readouterr().out
    with pytest.raises(BackendError, match="these graphs have problems:\n  steady: compiled again") as raised:
        present(report(recording(*run(0, "a", "s"))) | extra, as_json=as_json)
    assert raised.value.exit_code == 5
    failed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed) == sound
        assert json.loads(failed)["distinct_graphs"] == 2
    else:
        for words in ("4 graphs in 2 steps; world 8, ranks 0-1", "steady micro-batch", "0.25 = 1/4", "backend.layers"):
            assert words in printed
        assert "  first " in failed


def test_a_name_of_several_stages_and_a_long_note_stand_on_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    name = (
        "stage 0 evaluation forward chunk 1, stages 1-6 evaluation forward chunk 0, stage 7 evaluation forward chunk 0"
    )
    note = "traced with " + "words " * 60
    result = report(SOUND)
    result["graphs"][0]["name"] = name
    present({**result, "notes": [note], "seconds": [1.0]}, as_json=False)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith(f"{name} ")]
    assert note.strip() in lines


def test_ranks_of_every_kind_are_traced_by_default() -> None:
    assert some_ranks(plan("mha", parallel={"tp": 8}), 4096) == [0, 1, 7, 8, 2049, 4095]
    assert some_ranks(plan("mha"), 1) == [0]
