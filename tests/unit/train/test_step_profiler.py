"""Profiles of chosen steps, with their spans; other steps are not in them, and a full disk ends nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch

from nxtrain.common.run_folder import PROFILES_DIR
from nxtrain.train.step_profiler import StepProfiler


def events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as text:
        result: list[dict[str, Any]] = json.load(text)["traceEvents"]
    return result


def run(profiler: StepProfiler, first: int, last: int) -> None:
    """Steps that each multiply a matrix of their number."""
    for step in range(first, last + 1):
        profiler.enter(step, "data")
        profiler.enter(step, "training")
        profiler.section("forward")
        with torch.profiler.record_function(f"product {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.finish(step)


def test_the_chosen_steps_and_no_others_are_in_the_profile(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = StepProfiler(3, 4, tmp_path, 7, said.append)
    run(profiler, 1, 6)
    profiler.end("done", "")
    (file,) = (tmp_path / PROFILES_DIR).iterdir()
    assert said == [f"profile: {file}"]
    assert file.name == "rank-00007-steps-3-4.json.gz"
    result = events(file)
    names = [event["name"] for event in result]
    assert [name for name in names if name.startswith("product")] == ["product 3", "product 4"]
    assert [names.count(f"nxtrain.{work}") for work in ("data", "training")] == [2, 2]
    assert "aten::mm" in names
    assert names.count("nxtrain.forward") == 2
    assert [name for name in names if name.startswith("nxtrain.step ")] == ["nxtrain.step 3", "nxtrain.step 4"]
    for step in (3, 4):
        product = one(result, f"product {step}")
        of_step = [item for item in result if item["name"] == "nxtrain.forward" and within(product, item)]
        assert len(of_step) == 1
        assert within(of_step[0], one(result, f"nxtrain.step {step}"))


def one(result: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (event,) = (event for event in result if event["name"] == name)
    return event


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


def test_a_run_that_ends_within_the_steps_writes_those_it_has(tmp_path: Path) -> None:
    profiler = StepProfiler(2, 9, tmp_path, 0, lambda line: None)
    run(profiler, 1, 3)
    profiler.end("failed", "lost a rank")
    (file,) = (tmp_path / PROFILES_DIR).iterdir()
    assert {"product 2", "product 3"} <= {event["name"] for event in events(file)}


def test_a_run_that_resumes_behind_the_steps_profiles_nothing(tmp_path: Path) -> None:
    profiler = StepProfiler(2, 3, tmp_path, 0, lambda line: None)
    run(profiler, 4, 5)
    profiler.end("done", "")
    assert not (tmp_path / PROFILES_DIR).exists()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / PROFILES_DIR).write_text("no folder", encoding="utf-8")
    said: list[str] = []
    run(StepProfiler(1, 1, tmp_path, 0, said.append), 1, 2)
    assert len(said) == 1
    assert said[0].startswith("warning: the profile cannot be written: ")
