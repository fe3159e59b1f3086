"""Steps in float8 on a pretended GPU: torch's products for each layer, the host never waits, kernels are counted."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.cuda_sim.test_steps import BF16, step_alone
from tests.support.cuda_sim import SimulatedGpu, opened_gpu

PRODUCTS = {"tensorwise": "cublasLtMatmul", "rowwise": "cutlass.*device_kernel", "mxfp8": "cublasLtMatmul"}
"""Kernels of `torch._scaled_mm` on a Hopper, as in torch 2.9."""

LAUNCHES = {("tensorwise", False): 1772, ("rowwise", False): 1916, ("mxfp8", False): 2252}
COMPILED = {("tensorwise", True): 460, ("rowwise", True): 456}
"""Kernels of a step of two blocks and two micro-batches, as counted with torch 2.9.0; 620 and 300 in bf16."""


@pytest.mark.parametrize(
    ("recipe", "compiles"),
    [*LAUNCHES, ("tensorwise", True), pytest.param("rowwise", True, marks=pytest.mark.slow)],
)
def test_every_layer_multiplies_in_float8_and_no_host_waits(gpu: SimulatedGpu, recipe: str, compiles: bool) -> None:
    tables: dict[str, dict[str, Any]] = {"precision": {**BF16, "fp8": recipe}}
    if compiles:
        tables["compile"] = {"torch_compile": True}
    record = gpu.run(step_alone, tables)
    assert record.host_waits == []
    assert record.of("malloc", "free", "pin") == []
    found = Counter(bool(re.search(PRODUCTS[recipe], kernel)) for kernel in record.kernels)
    # Two blocks of four layers with three products each, and two micro-batches; the head alone multiplies in bf16.
    assert found[True] == 2 * 4 * 3 * 2
    assert record.kernels.count("cublasGemmEx") == 3 * 2
    assert len(record.kernels) <= 1.05 * {**LAUNCHES, **COMPILED}[recipe, compiles]


def refusals() -> dict[str, str]:
    """Answers of a Hopper to each recipe."""
    answers = {}
    with opened_gpu() as backend:
        for recipe in PRODUCTS:
            try:
                backend.choose_float8(recipe, "bf16")
            except Exception as error:
                answers[recipe] = str(error)
            else:
                answers[recipe] = backend.float8
    return answers


def test_a_hopper_tries_its_products_and_lacks_blocks(gpu: SimulatedGpu) -> None:
    answers = gpu.run(refusals)
    for recipe in ("tensorwise", "rowwise"):
        assert answers[recipe] == f"float8: {recipe}, by torch._scaled_mm"
    assert "needs compute capability 10.0, and this GPU has 9.0" in answers["mxfp8"]
    assert "use tensorwise, which needs less, or none" in answers["mxfp8"]
