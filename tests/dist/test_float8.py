"""Training in float8 on any layout is that of transformers whose linear layers have products by definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.parallel.float8 import Float8Linear, layers_in_float8
from nxtrain.parallel.linear import Product
from nxtrain.parallel.regions import TensorParallel
from tests.support.float8 import RECIPES, Exact
from tests.support.models import changed, weights_of
from tests.support.parity import Course, batches, course_of, layout, reference, start
from tests.support.ranks import RankPool

STEPS = 2
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"tp": 1},
    "tp2": {"tp": 2, "remat": "selective"},
    "dp2": {"tp": 1, "dp": 2},
    "zero1": {"tp": 2, "dp": 2, "shard": "zero1"},
    "full": {"tp": 1, "dp": 2, "shard": "full"},
    "tp2-sp-full": {"tp": 2, "dp": 2, "shard": "full", "sp": True, "remat": "full"},
    "tp2-pp2": {"tp": 2, "pp": 2, "schedule": "zero_bubble", "sp": True},
}
PAIRED = [
    *(("tensorwise", name) for name in LAYOUTS),
    *(("rowwise", name) for name in ("tp2", "full", "tp2-pp2")),
    *(("mxfp8", name) for name in ("alone", "tp2-sp-full")),
]
BOUND = 1e-6
"""Largest relative error of products in float32; the least numbers of float8 are 4e-6 of the largest."""

Pieces = tuple[Tensor, Tensor, Tensor]
"""Output, gradient of the input and gradient of the weight."""


def local(self: Float8Linear, *matrices: tuple[Tensor, bool]) -> list[Tensor]:
    """Magnitudes that no ranks share."""
    return [self._magnitudes(matrix) for matrix, _ in matrices]


def sharing(*, is_broken: bool) -> Any:
    """Context of this rank in which magnitudes are shared, or are not."""
    return mock.patch.object(Float8Linear, "magnitudes", local if is_broken else Float8Linear.magnitudes)


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input (S, B, I), weight (O, I) and gradient (S, B, O), whose entries differ by powers of two."""
    rng, generator = Random(f"float8/{seed}"), torch.Generator().manual_seed(seed)
    tokens = 2 * rng.randint(1, 20), rng.choice((1, 3))
    inputs, outputs = rng.choice((64, 128)), rng.choice((64, 192))

    def tensor(*shape: int) -> Tensor:
        exponents = torch.randint(-16, 1, shape, generator=generator)
        return torch.randn(shape, generator=generator) * torch.exp2(exponents.float())

    return tensor(*tokens, inputs), tensor(outputs, inputs), tensor(*tokens, outputs)


def layer(
    backend: Backend, recipe: Any, seed: int, enters: bool, sp: bool, postpones: bool, is_broken: bool = False
) -> Pieces:
    """A layer of two ranks: what this rank has of its output and gradients."""
    axis = Mesh.build(2, backend.rank, tp=2).tp
    tp = TensorParallel(axis, backend.collectives, backend.kernels, torch.float32, sp)
    x, weight, grad = drawn(seed)
    rows = x.chunk(2)[axis.rank]
    if enters:
        weight, grad = weight.chunk(2)[axis.rank], grad.chunk(2, -1)[axis.rank]
        x = rows if sp else x
    else:
        weight, x = weight.chunk(2, 1)[axis.rank], x.chunk(2, -1)[axis.rank]
    x, weight = x.requires_grad_(), weight.requires_grad_()
    postponed: list[Product] = []
    with sharing(is_broken=is_broken):
        out = Float8Linear(recipe, tp, enters)(x, weight, postponed.append if postpones else None)
        if postpones:
            (x_grad,) = torch.autograd.grad(out, x, grad)
            with torch.no_grad():
                return out.detach(), x_grad, postponed.pop()()
        x_grad, weight_grad = torch.autograd.grad(out, (x, weight), grad)
        return out.detach(), x_grad, weight_grad


def joined(parts: list[Pieces], *, enters: bool, sp: bool) -> Pieces:
    """Parts of both ranks, put together."""
    outs, x_grads, weight_grads = zip(*parts, strict=True)
    if enters:
        return torch.cat(outs, -1), torch.cat(x_grads) if sp else x_grads[0], torch.cat(weight_grads)
    return outs[0] + outs[1], torch.cat(x_grads, -1), torch.cat(weight_grads, 1)


def errors(found: Pieces, seed: int, recipe: str) -> list[float]:
    x, weight, grad = (tensor.double() for tensor in drawn(seed))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out: Tensor = Exact.apply(x, weight, recipe)
    wanted = (out.detach(), *torch.autograd.grad(out, (x, weight), grad))
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("enters", [True, False], ids=["column", "row"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_of_two_ranks_has_the_products_of_one(ranks: RankPool, recipe: str, enters: bool) -> None:
    for seed in range(4):
        sp = enters and seed % 2 == 0
        found = joined(ranks.run(2, layer, recipe, seed, enters, sp, seed > 1), enters=enters, sp=sp)
        assert max(errors(found, seed, recipe)) <= BOUND, (seed, sp)


@pytest.mark.parametrize("enters", [True, False], ids=["column", "row"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_magnitudes_of_one_rank_are_found_out(ranks: RankPool, recipe: str, enters: bool) -> None:
    found = joined(ranks.run(2, layer, recipe, 0, enters, False, False, True), enters=enters, sp=False)
    assert max(errors(found, 0, recipe)) > 2 * BOUND


def planned(recipe: str, **how: Any) -> Resolved:
    """A run in float8 whose micro-batches are one sequence, with the layers of transformers."""
    resolved = layout("gqa2", **how, batch=4, micro=1, seq_len=32, config=SHAPE, fused_qkv=False, fused_gate_up=False)
    return changed(resolved, precision={"fp8": recipe})


def in_float8(recipe: str) -> Callable[[nn.Module], nn.Module]:
    """Change of transformers' model, whose blocks then multiply in float8, sequence by sequence."""

    def product(linear: nn.Linear, x: Tensor) -> Tensor:
        return torch.stack([Exact.apply(row, linear.weight, recipe) for row in x])

    def change(model: nn.Module) -> nn.Module:
        for name, module in model.named_modules():
            if ".layers." in name and isinstance(module, nn.Linear):
                module.forward = partial(product, module)  # type: ignore[method-assign]
        return model

    return change


@cache
def expected(recipe: str) -> Course:
    return reference(planned(recipe, tp=1), STEPS, wrap=in_float8(recipe))


def trained(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], is_broken: bool = False) -> Course:
    """The course of a rank, all of whose layers multiply in float8."""
    state = start(backend, resolved, weights)
    assert layers_in_float8(state.model)[1] == []
    pairs = [(batch[:, :-1], batch[:, 1:]) for batch in batches(resolved, STEPS)]
    with sharing(is_broken=is_broken):
        return course_of(state, resolved, pairs)


def course(ranks: RankPool, recipe: str, name: str, *, is_broken: bool = False) -> Course:
    resolved = planned(recipe, **LAYOUTS[name])
    parallel = resolved.config.parallel
    world = parallel.tp * parallel.pp * (parallel.dp or 1)
    first: Course = ranks.run(world, trained, resolved, weights_of(resolved), is_broken)[0]
    return first


@pytest.mark.parametrize(("recipe", "name"), PAIRED, ids=lambda value: value)
def test_the_course_is_the_references(ranks: RankPool, recipe: str, name: str) -> None:
    found, want = course(ranks, recipe, name), expected(recipe)
    assert found.losses[0] == pytest.approx(want.losses[0], rel=0, abs=2e-6)
    # A sum of float32 in another order may cross a boundary between two numbers of float8.
    assert found.norms[0] == pytest.approx(want.norms[0], rel=5e-4)
    assert found.losses[1] == pytest.approx(want.losses[1], rel=2e-3)


def test_a_run_whose_ranks_share_no_magnitudes_is_found_out(ranks: RankPool) -> None:
    found = course(ranks, "tensorwise", "tp2", is_broken=True)
    assert abs(found.losses[0] - expected("tensorwise").losses[0]) > 1e-4
