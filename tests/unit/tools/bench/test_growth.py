"""Exponents of known curves, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.tools.bench import growth, growth_worker
from nxtrain.tools.bench.checkpoint import MATRICES_MIB, FilledState
from nxtrain.tools.bench.growth import (
    ACCUMULATION,
    CHECKPOINT,
    CURVES,
    LAYERS,
    SEQ_LEN,
    WORLD,
    GrowthJob,
    bench_growth,
    exponent,
    summarize,
)
from nxtrain.tools.bench.growth_worker import SHAPE, SIZES
from nxtrain.tools.bench.worker import ours


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_of_a_power_is_the_power(power: float) -> None:
    sizes = [2.0, 4.0, 16.0]
    assert exponent(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power)


def test_a_slow_round_changes_no_exponent() -> None:
    found = summarize({LAYERS: [1, 2, 4]}, {LAYERS: [[1.0, 2.0, 4.0], [10.0, 20.0, 40.0], [1.0, 4.0, 16.0]]})
    (row,) = found["rows"]
    assert row["rounds"] == pytest.approx([1.0, 1.0, 2.0])
    assert found["exponents"] == {LAYERS: pytest.approx(1.0)}
    assert row["cpu_s"] == [1.0, 4.0, 16.0]


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no curve 'width'"):
        bench_growth(curves=["width"], points=0, rounds=1, as_json=True)
    with pytest.raises(ConfigError, match="one point has no slope"):
        bench_growth(curves=[SEQ_LEN], points=1, rounds=1, as_json=True)
    monkeypatch.setattr(growth, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="needs torch-xla"):
        bench_growth(curves=[WORLD], points=0, rounds=1, as_json=True)


@pytest.mark.parametrize(("name", "least"), [(LAYERS, 2), (SEQ_LEN, 3), (ACCUMULATION, 2)])
def test_a_curve_measures_steps_of_its_sizes(monkeypatch: pytest.MonkeyPatch, name: str, least: int) -> None:
    """Twice the size has twice the products with weights, and up to four times those of blocks of attention."""
    shape = {**SHAPE, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    monkeypatch.setattr(growth_worker, "SHAPE", shape)
    products, attention, micro_batches = [], [], list[int]()

    def step_of(*args: Any, **settings: Any) -> Any:
        micro_batches.append(settings["micro_batches"])
        return ours(*args, **settings)

    monkeypatch.setattr(growth_worker, "ours", step_of)
    for step in growth_worker.steps(GrowthJob(name, CURVES[name].sizes[:2])):
        with FlopCounterMode(display=False) as counter:
            step()
        counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
        products.append(counted["aten.mm"])
        attention.append(sum(counted.values()) - counted["aten.mm"])
    assert micro_batches == (list(CURVES[name].sizes[:2]) if name == ACCUMULATION else [1, 1])
    head = 6 * shape["vocab_size"] * shape["hidden_size"] * SIZES[SEQ_LEN] if name == LAYERS else 0
    assert products[1] - head == 2 * (products[0] - head)
    assert least * attention[0] <= attention[1] <= (4 if name == SEQ_LEN else 2) * attention[0]


def test_a_curve_of_checkpoints_saves_and_loads_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, done = CURVES[CHECKPOINT].sizes, list[tuple[str, int]]()
    for act in ("save", "load"):
        monkeypatch.setattr(FilledState, act, lambda state, act=act: done.append((act, state.num_bytes >> 20)))
    for turn in growth_worker.checkpoints(GrowthJob(CHECKPOINT, sizes[:2])):
        turn()
    assert done == [(act, mib) for mib in sizes[:2] for act in ("save", "load")]
    assert all(mib % MATRICES_MIB == 0 for mib in sizes)
