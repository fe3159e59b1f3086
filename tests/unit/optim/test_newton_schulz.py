"""Newton-Schulz steps against singular values of float64, and against torch.optim.Muon's own iteration."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor
from torch.optim import _muon as torch_muon

from nxtrain.optim.newton_schulz import COEFFICIENTS, EPS, orthogonalize, update_scale
from tests.support.adamw import wide_newton_schulz
from tests.support.models import random


def drawn_shapes(number: int) -> list[tuple[int, int]]:
    """Odd, wide, tall and square shapes, and single rows and columns."""
    rng = Random("matrices")
    shapes = [(1, 1), (1, 37), (53, 1), (16, 16)]
    while len(shapes) < number:
        shapes.append((rng.randint(2, 90), rng.randint(2, 90)))
    return shapes


SHAPES = drawn_shapes(24)


def of_singular_values(shape: tuple[int, int], values: Tensor) -> Tensor:
    """Matrix of float64 with given singular values."""
    u, _, vt = torch.linalg.svd(random(*shape, dtype=torch.float64), full_matrices=False)
    made: Tensor = (u * values) @ vt
    return made


@pytest.mark.parametrize("steps", [1, 3, 5, 8])
def test_singular_values_go_through_the_polynomial_and_vectors_stay(steps: int) -> None:
    a, b, c = COEFFICIENTS
    for seed, shape in enumerate(SHAPES):
        x = random(*shape, dtype=torch.float64, seed=seed)
        u, values, vt = torch.linalg.svd(x, full_matrices=False)
        values = values / values.norm()
        for _ in range(steps):
            values = a * values + b * values**3 + c * values**5
        result = orthogonalize(x, steps, torch.float64)
        torch.testing.assert_close(result, (u * values) @ vt, rtol=0, atol=1e-11)


def test_five_steps_bring_large_and_small_singular_values_into_the_band() -> None:
    for shape in SHAPES:
        number = min(shape)
        values = torch.logspace(0, -2.3, number, dtype=torch.float64) if number > 1 else torch.ones(1).double()
        values[values < 2e-3 * values.norm()] = 2e-3 * values.norm()
        result = torch.linalg.svdvals(orthogonalize(of_singular_values(shape, values), 5, torch.float64))
        assert result.min() > 0.68, shape
        assert result.max() < 1.21, shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_iteration_is_that_of_torch(dtype: torch.dtype) -> None:
    theirs = wide_newton_schulz()
    for seed, shape in enumerate(SHAPES):
        x = random(*shape, dtype=dtype, seed=seed, scale=1e-3)
        expected = theirs(x, COEFFICIENTS, 5, EPS)
        atol = 2e-6 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(orthogonalize(x, 5, dtype), expected, rtol=0, atol=atol)


def test_bf16_is_as_near_to_float32_as_torchs_own_bf16() -> None:
    for seed, shape in enumerate(SHAPES):
        x = random(*shape, seed=seed)
        exact = orthogonalize(x, 5, torch.float32)
        actual = orthogonalize(x, 5, torch.bfloat16)
        theirs = torch_muon._zeropower_via_newtonschulz(x, COEFFICIENTS, 5, EPS).float()
        assert actual.dtype == torch.float32
        assert 0 < (actual - exact).norm() <= 0.06 * exact.norm(), shape
        assert (theirs - exact).norm() <= 0.06 * exact.norm(), shape


def test_a_matrix_of_zeros_stays_zero_and_scale_does_not_matter() -> None:
    assert not orthogonalize(torch.zeros(5, 3), 5, torch.float32).any()
    x = random(9, 14)
    torch.testing.assert_close(orthogonalize(x * 1e-3, 5, torch.float32), orthogonalize(x, 5, torch.float32))


def test_scales_are_those_of_torch() -> None:
    for shape in SHAPES:
        for ours, theirs in (("original", "original"), ("moonlight", "match_rms_adamw")):
            expected = torch_muon._adjust_lr(1.0, theirs, torch.Size(shape))
            assert update_scale(*shape, ours) == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]
