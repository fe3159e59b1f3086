"""`nxtrain graphs` builds models without host memory: the report is that of tensors with storage, for drawn runs."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nxtrain.backends.base import Backend
from nxtrain.backends.xla.tracing import UPLOADED_ENTRIES, TracingBackend
from nxtrain.config.check import Resolved
from nxtrain.tools.trace.trace import trace
from tests.support.models import changed
from tests.support.parity import layout
from tests.support.xla_engine import run_devices

SEED, WORLD = 5, 8
LARGE = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 512}
"""Sizes with which most matrices of a rank have more entries than those that are uploaded."""


def drawn() -> list[Resolved]:
    """Runs whose state has every kind of tensor: means, masters, compensation, sums, adapters, boundaries of stages."""
    draw = random.Random(SEED)
    forms: list[dict[str, Any]] = [
        {"tp": 2, "dp": 4, "shard": draw.choice(["none", "zero1"])},
        {"tp": 4, "dp": 2, "params": "bf16", "update": draw.choice(["fp32_master", "bf16_stochastic"])},
        {"tp": 2, "dp": 4, "params": "bf16", "update": "bf16_kahan", "shard": "zero1"},
        {"tp": 2, "dp": 2, "pp": 2},
    ]
    results = []
    for form in forms:
        micro = draw.randint(2, 4)
        results.append(layout("gqa2", sp=True, batch=micro * form["dp"], micro=1, config=LARGE, **form))
    return [*results, changed(results[0], finetune={"method": "lora", "r": 2})]


def both(backend: Backend, plans: list[Resolved]) -> list[tuple[dict[str, Any], dict[str, Any], int]]:
    """Reports of each run without and with storage, and the most entries of a host tensor that was uploaded."""
    uploaded: list[int] = []
    put = TracingBackend.put

    def noted(self: TracingBackend, x: torch.Tensor) -> torch.Tensor:
        if not self._recording and not x.is_meta:
            uploaded.append(x.numel() if not x.count_nonzero() else 0)
        return put(self, x)

    def report(plan: Resolved) -> dict[str, Any]:
        result = trace(plan, WORLD, [0, WORLD - 1], 2, None)
        return {key: value for key, value in result.items() if key != "seconds"}

    results = []
    for plan in plans:
        uploaded.clear()
        with patch.object(TracingBackend, "put", noted):
            without = report(plan)
        most = max(uploaded)
        with patch.object(TracingBackend, "building", lambda self: nullcontext()):
            results.append((without, report(plan), most))
    return results


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any], int]]:
    (result,) = run_devices(1, both, drawn(), folder=tmp_path_factory.mktemp("reports"))
    return list(result)


def test_graphs_are_those_of_tensors_with_storage(reports: list[tuple[dict[str, Any], dict[str, Any], int]]) -> None:
    for without, whole, _ in reports:
        assert without == whole
        assert without["graphs"]


def test_no_large_zeros_are_written_on_the_host(reports: list[tuple[dict[str, Any], dict[str, Any], int]]) -> None:
    assert [most for _, _, most in reports if most > UPLOADED_ENTRIES] == []
