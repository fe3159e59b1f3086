"""Exponents of known curves, and refusals."""

from __future__ import annotations

import pytest

from nxtrain.bench import growth
from nxtrain.bench.growth import LAYERS, SEQ_LEN, WORLD, bench_growth, exponent, summarize
from nxtrain.errors import BackendError, ConfigError


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
