"""Products in float8 on one rank: drawn shapes, extreme numbers, layers that do not fit, and mutants."""

from __future__ import annotations

import math
from itertools import product
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.float8_products import tiled_exponents
from nxtrain.common.mesh import Mesh
from nxtrain.parallel import float8
from nxtrain.parallel.float8 import Float8Linear, Recipe, layers_in_float8
from nxtrain.parallel.regions import TensorParallel
from nxtrain.train.build import build_model
from tests.support.contract_functions import Echo
from tests.support.float8 import E4M3, E5M2, RECIPES, Exact, largest_error
from tests.support.models import plan

TP = TensorParallel(Mesh.build(1, 0).tp, Echo(), CpuKernels(), torch.float32)
BOUND = 1e-6


def draws(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and gradient of drawn sizes and magnitudes, with zeros, and one row at times."""
    rng, generator = Random(f"float8/{seed}"), torch.Generator().manual_seed(seed)
    tokens, inputs, outputs = (rng.choice((1, 1, 5, 33)), 2), 32 * rng.randint(1, 4), 32 * rng.randint(1, 4)

    def tensor(*shape: int) -> Tensor:
        exponents = torch.randint(-rng.choice((1, 20)), 1, shape, generator=generator) + rng.randint(-30, 60)
        kept = torch.rand(shape, generator=generator) < rng.choice((0.5, 1.0))
        x = torch.randn(shape, generator=generator) * torch.exp2(exponents.float()) * kept
        return x * (torch.arange(shape[0]) != rng.randint(0, 3)).view(-1, *[1] * (len(shape) - 1))  # a row of zeros

    return tensor(*tokens, inputs), tensor(outputs, inputs), tensor(*tokens, outputs)


def passes(how: Any, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = how(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]


def worst(recipe: Recipe, number: int) -> float:
    """Largest relative error of some drawn layers."""
    layer = Float8Linear(recipe, TP, enters=True)
    errors = []
    for seed in range(number):
        given = draws(seed)
        found = passes(lambda x, w: layer(x, w, None), *given)
        wanted = passes(lambda x, w: Exact.apply(x, w, recipe), *(x.double() for x in given))
        errors += [largest_error(a, b) for a, b in zip(found, wanted, strict=True)]
    return max(errors)


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_definition(recipe: Recipe) -> None:
    assert worst(recipe, 40) <= BOUND


def gradients_of_few_digits(self: Float8Linear) -> torch.dtype:
    return torch.float8_e4m3fn if self.recipe == "tensorwise" else torch.float8_e5m2


PLAIN_MAGNITUDES = Float8Linear._magnitudes
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "gradients have the other type": (Float8Linear, "grad_type", property(gradients_of_few_digits)),
    "scales by a half": (Float8Linear, "_magnitudes", lambda *given: 1.9 * PLAIN_MAGNITUDES(*given)),
    "scales of any value": (float8, "_EXPONENT", 0x7FFFFFFF),
}


@pytest.mark.parametrize(
    ("recipe", "name"), [each for each in product(RECIPES, MUTANTS) if each != ("tensorwise", "scales of any value")]
)
def test_a_mutant_is_found_out(recipe: Recipe, name: str) -> None:
    place, attribute, wrong = MUTANTS[name]
    with mock.patch.object(place, attribute, wrong):
        assert worst(recipe, 20) > 2 * BOUND


@pytest.mark.parametrize(("dtype", "numbers"), [(torch.float8_e4m3fn, E4M3), (torch.float8_e5m2, E5M2)])
def test_the_references_numbers_are_those_of_torch(dtype: torch.dtype, numbers: Any) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite()]
    assert numbers.nearest(every).equal(every)
    drawn = torch.randn(10_000, dtype=torch.float64) * torch.exp2(torch.randint(-20, 9, (10_000,)).double())
    drawn = drawn.float().double().clamp(-numbers.most, numbers.most)
    assert numbers.nearest(drawn).equal(drawn.to(dtype).double())


@pytest.mark.parametrize("recipe", RECIPES)
def test_finite_numbers_stay_finite_and_others_are_seen(recipe: Recipe) -> None:
    layer = Float8Linear(recipe, TP, enters=False)
    most = torch.full((2, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert layer._cast(most, layer._magnitudes(most), dtype).values.float().isfinite().all()
    x = torch.full((2, 1, 32), 1e30, dtype=torch.bfloat16)
    weight = torch.full((32, 32), 1e-3, dtype=torch.bfloat16)
    for found in passes(lambda x, w: layer(x, w, None), x, weight, torch.ones(2, 1, 32, dtype=torch.bfloat16)):
        assert found.isfinite().all()
    for bad in (math.inf, math.nan):
        assert not layer(x.where(x > 0, x).index_fill(2, torch.tensor([3]), bad), weight, None).isfinite().any()
    assert not layer(torch.zeros_like(x), weight, None).any()


def test_layers_whose_sizes_do_not_fit_keep_their_products() -> None:
    config = {"hidden_size": 64, "intermediate_size": 72}
    resolved = plan("gqa2", model={"config": config}, precision={"fp8": "rowwise"})
    backend = CpuBackend()
    model = build_model(resolved, backend, Mesh.build(1, 0), init="draw")
    number, others = layers_in_float8(model)
    blocks = resolved.model.num_hidden_layers
    assert (number, others) == (3 * blocks, ["mlp.down_proj (64 x 72)"])


def test_exponents_are_tiled_as_cublas_reads_them() -> None:
    rows, columns = 200, 6
    exponents = torch.randint(-100, 100, (rows, columns))
    found = tiled_exponents(torch.exp2(exponents.float())).view(torch.uint8).int() - 127
    assert found.numel() == 256 * 8
    for row in range(0, rows, 7):
        for column in range(columns):
            tile = (row // 128) * 2 + column // 4
            place = 512 * tile + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
            assert found[place] == exponents[row, column]
