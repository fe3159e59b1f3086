"""`nxtrain graphs` with few of a step's micro-batches: the report is that of all of them, for drawn runs."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest

from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.tools.trace.trace import trace
from nxtrain.train import graph_extraction
from tests.support.models import changed
from tests.support.parity import layout
from tests.support.xla_engine import run_devices

SEED = 3
WORLD = 8


def drawn() -> list[Resolved]:
    """Runs of one stage and of pipelines, with 4 to 16 micro-batches a step."""
    draw = random.Random(SEED)
    forms: list[dict[str, Any]] = [
        {"tp": 2, "dp": 4, "shard": draw.choice(["none", "zero1"])},
        {"tp": 4, "dp": 2, "params": "bf16", "update": "fp32_master"},
        {"tp": 2, "dp": 2, "pp": 2, "shard": draw.choice(["none", "zero1"])},
        {"tp": 2, "dp": 2, "pp": 2, "virtual_pp": 2, "config": {"num_hidden_layers": 4}},
        {"tp": 2, "dp": 1, "pp": 4, "config": {"num_hidden_layers": 4}},
    ]
    results = []
    for form in forms:
        num_micro = draw.randint(4, 8) if "pp" not in form else draw.randint(10, 16)
        small = layout("gqa2", sp=True, batch=num_micro * form["dp"], micro=1, **form)
        results.append(changed(small, train={"eval_every": 2, "eval_batches": 1}))
    return results


def both(backend: Backend, plans: list[Resolved]) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Reports of each run: as the command traces it, with all micro-batches, and, without stages, with the first."""

    def report(plan: Resolved) -> dict[str, Any]:
        result = trace(plan, WORLD, [0, WORLD - 1], 2, None)
        return {key: value for key, value in result.items() if key != "seconds"}

    def of_run(config: Any, mesh: Mesh) -> Any:
        return config.train

    def first(config: Any, mesh: Mesh) -> Any:
        return config.train.model_copy(update={"global_batch": mesh.dp.size})

    results: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    for plan in plans:
        short = report(plan)
        with patch("nxtrain.tools.trace.trace.few_micro_batches", of_run):
            whole = report(plan)
        if whole["stages"] > 1:
            results.append((short, whole, {}))
            continue
        with patch("nxtrain.tools.trace.trace.few_micro_batches", first):
            results.append((short, whole, report(plan)))
    return results


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    (result,) = run_devices(1, both, drawn(), folder=tmp_path_factory.mktemp("micro"))
    return list(result)


@pytest.mark.parametrize("case", range(len(drawn())))
def test_few_micro_batches_show_every_graph_of_a_step(
    case: int, reports: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
) -> None:
    short, whole, first = (dict(item) for item in reports[case])
    traced = [report.pop("micro_batches") for report in (short, whole, first) if report]
    assert {counts["of_run"] for counts in traced} == {traced[1]["traced"]}
    assert traced[0]["traced"] < traced[0]["of_run"]
    assert short == whole
    # A step of one micro-batch, such as of a batch ramp's first stage, is none of its own in a run that accumulates.
    if whole["stages"] == 1:
        assert first["graphs"] == whole["graphs"]


def test_a_step_of_few_micro_batches_is_traced_whole() -> None:
    for num_micro in range(1, graph_extraction.MICRO_BATCHES + 1):
        config = layout("gqa2", tp=2, dp=4, batch=num_micro * 4, micro=1).config
        mesh = Mesh.build(WORLD, 0, tp=2)
        assert graph_extraction.few_micro_batches(config, mesh) == config.train
