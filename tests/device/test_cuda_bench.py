"""Benchmarks on NVIDIA GPUs: their own clocks, and a peak that the maker's figure bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest
import torch

from nxtrain.backends.base import Backend
from nxtrain.tools.bench import training
from nxtrain.tools.bench.collectives import OPERATIONS
from nxtrain.tools.bench.optim import CASES, PEER
from nxtrain.tools.bench.train import PEAK, SHAPE, Workload
from tests.support.processes import patient_s

pytestmark = [pytest.mark.cuda, pytest.mark.alone]


def command(*argv: str) -> dict[str, Any]:
    options = ("--backend", "cuda", "--rounds", "2", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "nxtrain", "bench", *argv, *options],
        capture_output=True,
        text=True,
        timeout=patient_s(280),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert torch.cuda.get_device_name(0) in result["devices"]
    return result


def test_the_peak_of_products_is_near_that_of_the_maker(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "open_backend", lambda _: backend)
    turn = training.turns(PEAK, asdict(Workload(1, 1, 128, "bf16", SHAPE, backend="cuda")))[""]
    turn()
    maker = backend.diagnostics.peak_flops()
    assert maker is not None, "a GPU whose peak nobody published here"
    assert 0.5 < turn()["device"] / maker < 1.0


def test_steps_are_measured_by_the_device() -> None:
    result = command("train", "--candidates", "nxtrain,nxtrain_compiled", "--steps", "10", "--batch", "2")
    assert result["clock"] == "device"
    assert all(0 < row["mfu"] < 1 for row in result["rows"] if row["name"] != PEAK)


@pytest.mark.usefixtures("has_80_gb")
def test_all_candidates_of_the_documented_command_fit_one_after_the_other() -> None:
    result = command("train", "--preset", "llama3.2-1b", "--seq-len", "4096", "--steps", "2")
    assert {row["name"] for row in result["rows"]} >= {PEAK, "nxtrain", "nxtrain_compiled", "transformers"}
    assert all(0 < row["mfu"] < 1 for row in result["rows"] if row["name"] != PEAK)


def test_updates_are_measured_by_the_device() -> None:
    result = command("optim", "--layers", "8")
    assert result["clock"] == "device"
    assert {*result["rules"]} == {PEER, *(case.name for case in CASES)}
    assert all(rule["ns_per_param"] > 0 for rule in result["rules"].values())


@pytest.mark.usefixtures("has_two_gpus")
def test_collectives_between_two_gpus_are_measured_by_the_device() -> None:
    result = command("collectives", "--sizes-kib", "4,16384")
    assert result["clock"] == "device"
    assert {*result["latency_s"]} == {*OPERATIONS}


@pytest.mark.usefixtures("has_two_gpus")
def test_a_pipeline_of_two_gpus_has_the_bubble_of_its_formula() -> None:
    result = command("pipeline", "--pp", "2", "--micro", "4", "--forward-ms", "40")
    assert result["measured"]["bubble"] == pytest.approx(1 / 5, rel=0.1)
