"""The section of evaluations: each task's points over tokens, of the newest requests, whatever the file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.run_folder import EVALUATIONS_FILE
from nxtrain.tools.report.figures import evaluations
from nxtrain.tools.report.page import render
from nxtrain.tools.report.run import read_runs


def line(tokens: object, value: object, task: str = "cloze", question: str = "q", **more: object) -> dict[str, Any]:
    metrics = {"accuracy": value, "stderr": 0.01, "n": 100, **more}
    return {"step": 1, "tokens": tokens, "weights": "w", "task": task, "question": question, "metrics": metrics}


def write(folder: Path, *lines: object) -> Path:
    folder.mkdir()
    (folder / EVALUATIONS_FILE).write_text("".join(f"{json.dumps(each)}\n" for each in lines), encoding="utf-8")
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
