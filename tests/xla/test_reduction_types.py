"""Gradients are reduced in the configured type on PyTorch/XLA: in the graph, in its report, and by the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.parallel.precision import DTYPES
from tests.dist.test_reduction_types import formula, of_each, own_gradients, reduced_gradient, reducing, shard_pairs
from tests.support.graph_mutants import traced
from tests.support.models import changed, weights_of
from tests.support.parity import layout, table_of
from tests.support.xla_engine import run_devices

WORLD = Mesh.build(4096, 0, tp=8)
SCALAR_BYTES = 16
"""At most: the loss with the number of tokens, and the number that torch-xla adds to each sum to order them."""
TRACED = [(shard, params, reduce) for shard in ("none", "zero1") for params in ("fp32", "bf16") for reduce in DTYPES]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Reports of `nxtrain graphs` on a rank of 4096, by cut, type of the parameters and of the reduction."""
    plans = []
    for shard, params, reduce in TRACED:
        plan = layout("gqa2", tp=8, dp=512, sp=True, micro=1, batch=512, params=params, shard=shard)
        plans.append((changed(plan, precision={"reduce": reduce}), "", [0]))
    (result,) = run_devices(1, traced, 4096, plans, folder=tmp_path_factory.mktemp("traced"))
    return dict(zip(TRACED, result, strict=True))


@pytest.mark.parametrize(("shard", "params", "reduce"), TRACED)
def test_the_graph_reduces_as_many_bytes_as_the_type_makes_of_the_gradients(
    reports: dict[tuple[str, str, str], dict[str, Any]], shard: str, params: str, reduce: str
) -> None:
    rows = {name: spec.local_shape(WORLD.tp) for name, spec in table_of(_plan(shard), WORLD).items()}
    cut = 512 if shard == "zero1" else 1
    elements = sum(math.ceil(shape[0] / cut) * cut * math.prod(shape[1:]) for shape in rows.values())
    (steady,) = (graph for graph in reports[shard, params, reduce]["graphs"] if graph["name"] == "steady")
    actual = {
        collective["op"]: collective["bytes"]
        for collective in steady["collectives"]
        if collective["axis"] in ("dp", "shard")
    }
    expected = elements * DTYPES[reduce].itemsize
    if shard == "none":
        actual["all-reduce"] -= expected
    else:
        assert actual.pop("reduce-scatter") == expected
        assert actual.pop("all-gather") == elements * DTYPES[params].itemsize
    assert 0 < actual.pop("all-reduce") <= SCALAR_BYTES and not actual


def _plan(shard: str) -> Resolved:
    return layout("gqa2", tp=8, dp=512, sp=True, micro=1, batch=512, shard=shard)


RUN = [("none", 2), ("zero1", 1)]


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, str], list[dict[str, Tensor]]]:
    """By cut, accumulation and type: the gradients that two devices reduced, by rank."""
    cases = [(shard, accumulation, reduce) for shard, accumulation in RUN for reduce in DTYPES]
    plans = [reducing(shard, reduce, params="fp32", dp=2, accumulation=n) for shard, n, reduce in cases]
    folder = tmp_path_factory.mktemp("reduced")
    by_rank = run_devices(2, of_each, reduced_gradient, plans, weights_of(plans[0]), folder=folder)
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Tensor]]]:
    """By accumulation: the gradient of each sequence, on one device."""
    plans = [reducing(shard, "fp32", params="fp32", dp=2, accumulation=n) for shard, n in RUN]
    folder = tmp_path_factory.mktemp("own")
    (result,) = run_devices(1, of_each, own_gradients, plans, weights_of(plans[0]), folder=folder)
    return {n: rows for (_, n), rows in zip(RUN, result, strict=True)}


@pytest.mark.parametrize(("shard", "accumulation"), RUN)
def test_reduced_gradients_are_those_of_the_formula_in_that_type(
    reduced: dict[tuple[str, int, str], list[dict[str, Tensor]]],
    own: dict[int, list[dict[str, Tensor]]],
    shard: str,
    accumulation: int,
) -> None:
    narrow = reducing(shard, "bf16", params="fp32", dp=2, accumulation=accumulation)
    for reduce, tolerance in (("fp32", 1e-5), ("bf16", 2**-8)):
        resolved = changed(narrow, precision={"reduce": reduce})
        expected = formula(own[accumulation], resolved)
        for rank, actual in enumerate(reduced[shard, accumulation, reduce]):
            for name, (ours, want) in shard_pairs(actual, expected, resolved, 2, rank).items():
                # XLA adds up a graph of two devices in another order: some last bits fall to the other side.
                assert (ours - want).norm() <= tolerance * want.norm(), name
                if reduce == "bf16":
                    assert torch.equal(ours, ours.bfloat16().float()), name
                    assert (ours == want).float().mean() > 0.9, name
    for wide, rounded in zip(reduced[shard, accumulation, "fp32"], reduced[shard, accumulation, "bf16"], strict=True):
        for name, shard_ in wide.items():
            if name != "model.embed_tokens.weight":  # most of its rows are of one rank only
                assert (shard_ == rounded[name].float()).float().mean() < 0.5, name
