"""The parameter norm at step 0: drawn shapes against a sum over their entries, and scales that are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import Init, ShardSpec
from nxtrain.config.check import Resolved
from nxtrain.nn.init import draw_shard
from nxtrain.train import build
from nxtrain.train.health import initial_norm
from nxtrain.train.health.initial_norm import ClosedForm, measure_initial_norm
from tests.support.ranks import RankPool, ranks
from tests.support.runs import records, run_plan, token_file, train_rank

__all__ = ["ranks"]

ALONE = Axis("tp", 0, ((0,),))
INITS = st.one_of(
    st.builds(Init, st.just("normal"), st.sampled_from([0.001, 0.02, 0.3])),
    st.sampled_from([Init("ones"), Init("zeros")]),
)
SHAPES = st.lists(st.integers(1, 300), min_size=1, max_size=2).map(tuple)
SPECS = st.lists(st.builds(ShardSpec, SHAPES, init=INITS), min_size=1, max_size=5)


def drawn_norm(specs: list[ShardSpec], seed: int, factor: float = 1.0) -> float:
    """Norm of all entries, one by one in float64."""
    total = 0.0
    for number, spec in enumerate(specs):
        tensor = torch.zeros(spec.shape)
        draw_shard(tensor, f"tensor {number}", spec, ALONE, seed)
        if spec.init.kind == "normal":
            tensor *= factor
        total += float((tensor.double() ** 2).sum())
    return math.sqrt(total)


@given(SPECS, st.integers(0, 9))
def test_drawn_shapes_have_the_norm_of_the_closed_form(specs: list[ShardSpec], seed: int) -> None:
    assert ClosedForm.of(specs).explains(drawn_norm(specs, seed))


@given(
    st.tuples(st.integers(100, 300), st.integers(50, 300)), st.sampled_from([0.02, 0.3]), st.sampled_from([0.9, 1.1])
)
def test_another_scale_is_refused(shape: tuple[int, int], std: float, factor: float) -> None:
    specs = [ShardSpec(shape, init=Init("normal", std)), ShardSpec((10,), init=Init("zeros"))]
    assert not ClosedForm.of(specs).explains(drawn_norm(specs, 0, factor))


def test_a_tied_copy_counts_once() -> None:
    spec, copy = ShardSpec((7, 9)), ShardSpec((7, 9), tied_to="embedding")
    assert ClosedForm.of([spec, copy]) == ClosedForm.of([spec])
    assert ClosedForm.of([]).explains(0.0)


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp": 1, "dp": 1}, {}),
    ({"tp": 2, "dp": 1}, {"params": "bf16", "update": "fp32_master"}),
    ({"tp": 1, "pp": 2, "dp": 1}, {}),
    ({"tp": 1, "dp": 2, "shard": "full"}, {"params": "bf16", "update": "bf16_kahan"}),
]


def test_runs_of_every_layout_record_the_same_norms(ranks: RankPool, tmp_path: Path) -> None:
    data = {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", num_rows=18))}
    results = []
    for number, (parallel, precision) in enumerate(LAYOUTS):
        plan = run_plan(tmp_path / str(number), data, steps=2, parallel=parallel, precision=precision)
        world = parallel["tp"] * parallel["dp"] * parallel.get("pp", 1)
        ranks.run(world, train_rank, plan)
        first, second = records(plan.config.run.dir)
        assert "param_norm_0" not in second
        results.append((first["param_norm_0"], first["param_norm_expected"]))
    assert {expected for _, expected in results} == {results[0][1]}
    for norm, expected in results:
        assert norm == pytest.approx(results[0][0], rel=1e-3)
        assert norm == pytest.approx(expected, rel=0.02)


def both_norms(backend: Backend, resolved: Resolved) -> tuple[float, float]:
    """Norm of drawn weights as the hosts sum it for lazy devices, and as the devices do."""
    mesh = build.mesh_of(resolved, backend)
    model = build.build_model(resolved, backend, mesh, init="draw")
    state = build.build_state(resolved, model, backend, mesh)
    of_devices = backend.fetch({"norm": state.gradients.norm(state.data_parallel.shards)})["norm"]
    return initial_norm._norm_on_host(state), of_devices


@pytest.mark.parametrize(("parallel", "precision"), [*LAYOUTS, ({"tp": 2, "dp": 2}, {})])
def test_hosts_sum_the_norm_that_the_devices_sum(
    ranks: RankPool, tmp_path: Path, parallel: dict[str, Any], precision: dict[str, Any]
) -> None:
    data = {"source": "tokens", "path": "none"}
    plan = run_plan(tmp_path, data, steps=2, parallel=parallel, precision=precision)
    world = parallel["tp"] * parallel["dp"] * parallel.get("pp", 1)
    for on_host, on_device in ranks.run(world, both_norms, plan):
        assert on_host == pytest.approx(on_device, rel=1e-6)


def wrong_scale(backend: Backend, resolved: Resolved) -> str:
    """Line about weights that are drawn a tenth too large."""
    mesh = build.mesh_of(resolved, backend)
    model = build.build_model(resolved, backend, mesh, init="draw")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return measure_initial_norm(build.build_state(resolved, model, backend, mesh))[1]


def test_a_model_of_another_scale_is_a_warning(ranks: RankPool, tmp_path: Path) -> None:
    plan = run_plan(tmp_path, {"source": "tokens", "path": "none"}, steps=1, parallel={"tp": 1, "dp": 1})
    (line,) = ranks.run(1, wrong_scale, plan)
    assert line.startswith("WARNING: parameter norm ")
    assert "another scale or shape" in line
