"""Exponents of attention's cost, and the sides that are measured."""

from __future__ import annotations

import json

import pytest
import torch

from nxtrain.tools.bench.attention import SIDES, exponents
from tests.support.commands import output_of


def test_exponents_are_those_of_powers_of_the_length() -> None:
    points = [(1 << power, 3.0 * (1 << power) ** 1.5, 5 * (1 << power) ** 2) for power in range(10, 16)]
    assert exponents(points) == pytest.approx({"time": 1.5, "memory": 2.0}, rel=1e-6)


def test_all_sides_compute_the_same() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(30, 1, heads, 8, generator=generator) for heads in (2, 1, 1))
    starts = torch.tensor([[0] * 7 + [7] * 23])
    result = [side(q, k, v, starts) for side in SIDES.values()]
    for other in result[1:]:
        torch.testing.assert_close(other, result[0])


def test_a_mask_takes_more_memory_than_blocks() -> None:
    result = json.loads(output_of("bench", "attention", "--longest", "2048", "--rounds", "1", "--json"))
    peaks = {row["name"]: row["peak_bytes"] for row in result["rows"]}
    assert set(peaks) == {f"{name} {length}" for name in SIDES for length in (1024, 2048)}
    assert peaks["mask 2048"] > 2 * peaks["mask 1024"]
    assert set(result["exponents"]) == set(SIDES)
