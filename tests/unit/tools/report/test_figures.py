"""Charts of the page: areas of a run's time on drawn records, and evaluations over tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxtrain.common.run_folder import ENVIRONMENT_FILE, EVALUATIONS_FILE
from nxtrain.metrics.status import KINDS_S, SECTIONS_S
from nxtrain.tools.report.facts import PARTS
from nxtrain.tools.report.figures import breakdown, evaluations, judge
from nxtrain.tools.report.page import render
from nxtrain.tools.report.run import read_run, read_runs
from tests.support.run_folders import record, write_run

TIMES = st.fixed_dictionaries({key: st.integers(0, 50) for key in (*KINDS_S, *SECTIONS_S)})


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TIMES, min_size=1, max_size=5), st.booleans())
def test_shares_are_those_of_the_sums(tmp_path: Path, drawn: list[dict[str, int]], divided: bool) -> None:
    records = []
    for step, times in enumerate(drawn, 1):
        sections = {key: times[key] for key in SECTIONS_S} if divided else {}
        whole = {key: times[key] for key in KINDS_S} | {"training_s": times["training_s"] + sum(sections.values())}
        records.append(record(step, **whole, **sections))
    sums = {key: sum(item.get(key, 0) for item in records) for key in PARTS}
    sums["training_s"] -= sum(sums[key] for key in SECTIONS_S)
    total = sum(sums.values())
    actual = breakdown(read_run(write_run(tmp_path, records=records)))
    if not total:
        assert actual is None
        return
    assert actual is not None
    names = {**PARTS, **({"training_s": "rest of the steps"} if divided else {})}
    expected = {names[key]: value / total for key, value in sums.items() if value}
    assert {name: share for _, name, _, share in actual["areas"]} == pytest.approx(expected)
    assert len({color for color, *_ in actual["areas"]}) == len(actual["areas"])


@pytest.mark.parametrize(
    ("instance", "tokens", "limit"), [("trn1.32xlarge", 64, "memory-bound"), ("trn1.32xlarge", 4096, "compute-bound")]
)
def test_a_known_machine_decides_between_memory_and_arithmetic(
    tmp_path: Path, instance: str, tokens: int, limit: str
) -> None:
    """A NeuronCore of trn1 does 232 operations for each byte that it reads, and fp32 weights have four bytes."""
    train = {"steps": 60, "global_batch": 16, "seq_len": tokens, "micro_batch": 1}
    cluster = {"instance": instance, "nodes": 1}
    result = judge(read_run(write_run(tmp_path, records=[record(1)], cluster=cluster, train=train)))
    assert result.startswith(f"{limit}: ")


def test_a_gpu_whose_host_never_waits_is_launch_bound(tmp_path: Path) -> None:
    times = {"data_s": 0.0, "training_s": 0.97, "log_s": 0.03}
    folder = write_run(tmp_path, records=[record(step, **times) for step in (1, 2)], environment={"asynchronous": True})
    assert judge(read_run(folder)).startswith("launch-bound: the host issues work for 97%")
    (folder / ENVIRONMENT_FILE).write_text(json.dumps({"asynchronous": False}), encoding="utf-8")
    assert judge(read_run(folder)).startswith("bound by its steps: ")


def line(tokens: object, value: object, task: str = "cloze", question: str = "q", **more: object) -> dict[str, Any]:
    metrics = {"accuracy": value, "stderr": 0.01, "n": 100, **more}
    return {"step": 1, "tokens": tokens, "weights": "w", "task": task, "question": question, "metrics": metrics}


def write(folder: Path, *lines: object) -> Path:
    folder.mkdir()
    (folder / EVALUATIONS_FILE).write_text("".join(f"{json.dumps(item)}\n" for item in lines), encoding="utf-8")
    return folder


def test_accuracy_is_drawn_over_tokens_with_its_error(tmp_path: Path) -> None:
    run = write(tmp_path / "run", line(3000, 0.75), line(1000, 0.25), line(2000, 0.5), line(1000, 0.3))
    (chart,) = evaluations(read_runs([run]))
    assert (chart["title"], chart["x_range"]) == ("cloze: accuracy", (1000.0, 3000.0))
    assert chart["head"][1:] == ["accuracy", "accuracy + error", "accuracy - error"]
    assert [row[:2] for row in chart["rows"]] == [["1,000", "0.3"], ["2,000", "0.5"], ["3,000", "0.75"]]
    assert [row[2:] for row in chart["rows"]] == [["0.31", "0.29"], ["0.51", "0.49"], ["0.76", "0.74"]]
    page = render(read_runs([run]))
    assert '<h2 id="evaluations-head">Evaluations</h2>' in page
    assert "cloze: accuracy" in page


def test_requests_of_other_seeds_make_no_curve_with_the_newest(tmp_path: Path) -> None:
    run = write(tmp_path / "run", line(1000, 0.2, question="old"), line(1000, 0.4), line(2000, 0.6))
    (chart,) = evaluations(read_runs([run]))
    assert [row[:2] for row in chart["rows"]] == [["1,000", "0.4"], ["2,000", "0.6"]]


def test_runs_have_a_curve_each(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, line(1000, value, stderr=None)) for name, value in (("a", 0.2), ("b", 0.4))]
    (chart,) = evaluations(read_runs(runs))
    assert [curve.name for curve in chart["curves"]] == ["a", "b"]


@pytest.mark.parametrize(
    "damaged",
    [
        {"tokens": 5},
        line(None, 0.5),
        line(5, "high"),
        line(5, True),
        line(float("inf"), 0.5),
        line(5, 1e300),
        {**line(5, 0.5), "metrics": []},
        {**line(5, 0.5), "metrics": {}},
        {**line(5, 0.5), "task": ["x"]},
        [1, 2],
    ],
)
def test_lines_that_are_no_results_are_left_out(tmp_path: Path, damaged: object) -> None:
    assert evaluations(read_runs([write(tmp_path / "run", damaged)])) == []
    (tmp_path / "run" / EVALUATIONS_FILE).unlink()
    page = render(read_runs([tmp_path / "run"]))
    assert "Evaluations" not in page
