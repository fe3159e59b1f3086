"""NKI's blockwise kernels compute dropless experts, with the gradients of tokens, routing and matrices.

References: the sum over the experts of each token by its formula in float64, differentiated by torch. The kernels are
stand-ins with the signatures, layouts and conditions of the true ones (`tests/support/nki_blockwise.py`).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.expert_choice import ExpertShape
from nxtrain.backends.neuron.blockwise import NkiBlockwise, load
from nxtrain.backends.neuron.experts import choose_experts
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.common.blockwise import ExpertBlocks
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.parallel.blockwise_experts import by_kernel
from nxtrain.parallel.expert_products import ExpertMatrices
from tests.support import nki_blockwise
from tests.support.contract_experts import exact_mixture
from tests.support.nki_blockwise import STAND_INS

TRN1, TRN2 = INSTANCES["trn1.32xlarge"], INSTANCES["trn2.48xlarge"]
SHAPE = ExpertShape(num_tokens=4096, hidden_size=2048, width=768, params="bf16")
SDK = SdkVersion(2, 29)
SIZE = 512
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error by type, relative to the L2 norm; that of gradients of weights relative to their summands."""


def drawn_routing(rng: Random, tokens: int, k: int, num_experts: int) -> Tensor:
    """Experts of each token: at random, all of them the same, or only some of them."""
    allowed = rng.sample(range(num_experts), rng.choice((k, num_experts)))
    return torch.tensor([rng.sample(allowed, k) for _ in range(tokens)])


def largest_error(seed: int, dtype: torch.dtype, kernel: NkiBlockwise = STAND_INS) -> float:
    """Largest relative error of the output and of four gradients of drawn experts."""
    rng = Random(seed)
    tokens, num_experts, width = rng.choice((1, 7, 300)), rng.choice((2, 3, 5)), rng.choice((64, 128))
    k = rng.choice((1, 2))
    indices = drawn_routing(rng, tokens, k, num_experts)
    generator = torch.Generator().manual_seed(seed)
    if rng.random() < 0.5:  # experts of other ranks, which have the number of this rank's experts
        indices = torch.where(torch.rand(indices.shape, generator=generator) < 0.3, num_experts, indices)
    shapes = [(tokens, SIZE), (num_experts * 2 * width, SIZE), (SIZE, num_experts * width), (tokens, SIZE)]
    scales = (1.0, 0.05, 0.05, 1.0)
    x, gate_up, down, grad = (
        (torch.randn(shape, generator=generator) * scale).to(dtype) for shape, scale in zip(shapes, scales, strict=True)
    )
    weights = torch.rand(indices.shape, generator=generator).to(dtype).float()
    ours = [x.clone().requires_grad_() for x in (x, weights, gate_up, down)]
    exact = [x.detach().double().requires_grad_() for x in ours]
    matrices = ExpertMatrices(ours[2], ours[3], num_experts)
    out = by_kernel(ours[0], ours[1], indices, matrices, tokens * k, kernel)
    out.backward(grad)
    # An expert of zeros stands for those of other ranks.
    experts = F.pad(exact[2], (0, 0, 0, 2 * width)), F.pad(exact[3], (0, width)), num_experts + 1
    wanted = exact_mixture(exact[0], exact[1], indices, *experts)
    wanted.backward(grad.double())
    of_weights = torch.zeros(tokens, k, dtype=torch.float64)  # norms of the products whose sums are their gradients
    for choice in range(k):
        of_choice = exact_mixture(exact[0], torch.eye(k)[choice].expand(tokens, k).double(), indices, *experts)
        of_weights[:, choice] = (of_choice.detach() * grad.double()).norm(dim=1)
    errors = []
    for mine, true in [(out, wanted), *((x.grad, y.grad) for x, y in zip(ours, exact, strict=True))]:
        assert mine is not None
        assert true is not None
        norm = (of_weights if mine is ours[1].grad else true.detach()).norm().clamp(min=1e-6)
        errors.append(float((mine.detach().double() - true.detach()).norm() / norm))
    return max(errors)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("seed", range(6))
def test_outputs_and_gradients_are_those_of_the_formula(seed: int, dtype: torch.dtype) -> None:
    assert largest_error(seed, dtype) < TOLERANCE[dtype]


class WithPadding(NkiBlockwise):
    """A row without a token takes the last token."""

    def products(self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, blocks: ExpertBlocks) -> Any:
        wrong = replace(blocks, tokens=blocks.tokens.clamp(max=len(x) - 1))
        return super().products(x, weights, gate_up, down, wrong)


class OfNeighbour(NkiBlockwise):
    """The last block has the expert before its own."""

    def products(self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, blocks: ExpertBlocks) -> Any:
        shifted = torch.cat([blocks.owner[:1], blocks.owner[:-1]])
        return super().products(x, weights, gate_up, down, replace(blocks, owner=shifted))


class Twice(NkiBlockwise):
    """Weights multiply twice."""

    def products(self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, blocks: ExpertBlocks) -> Any:
        return super().products(x, weights * weights, gate_up, down, blocks)


class Frozen(NkiBlockwise):
    """The router gets no gradient."""

    def gradients(self, *given: Any) -> Any:
        x_grad, weights_grad, *others = super().gradients(*given)
        return x_grad, torch.zeros_like(weights_grad), *others


class Swapped(NkiBlockwise):
    """Gate and values are taken for each other."""

    def products(self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, blocks: ExpertBlocks) -> Any:
        halves = gate_up.unflatten(0, (weights.shape[1], 2, -1)).flip(1).reshape(gate_up.shape)
        return super().products(x, weights, halves, down, blocks)


@pytest.mark.parametrize("mutant", [WithPadding, OfNeighbour, Twice, Frozen, Swapped])
def test_a_wrong_call_is_noticed(mutant: type[NkiBlockwise]) -> None:
    kernel = mutant(STAND_INS.forward, STAND_INS.backward, STAND_INS.scale_after)
    errors = [largest_error(seed, torch.float32, kernel) for seed in range(6)]
    assert max(errors) > 100 * TOLERANCE[torch.float32]


def test_blocks_are_higher_where_experts_have_many_rows() -> None:
    assert STAND_INS.height(num_slots=4096, num_experts=8) == 512
    assert STAND_INS.height(num_slots=4095, num_experts=8) == 256


@pytest.mark.parametrize(
    ("shape", "how", "obstacle"),
    [
        ({}, {"instance": TRN1}, "they need 2 physical cores per logical core, as on Trn2"),
        ({}, {"sdk": SdkVersion(2, 30)}, "they are those of Neuron SDK 2.29, and this is 2.30"),
        ({"params": "fp32"}, {}, "they multiply in bf16, which precision.params=fp32 does not ask for"),
        ({"dropless": False}, {}, "they need model.moe_dispatch=dropless, and the run has capacity"),
        ({"is_plain": False}, {}, "they do not support biases, clamped activations and adapters of experts"),
        ({"hidden_size": 2880}, {}, "the hidden size 2,880 is not a multiple of 512 up to 8,192"),
        ({"hidden_size": 8704}, {}, "the hidden size 8,704 is not a multiple of 512 up to 8,192"),
        ({"width": 96}, {}, "experts are 96 wide on a rank, which is not a multiple of 64"),
        ({"num_tokens": 65536}, {}, "a rank has 65,536 tokens in a call, and they support 32,768 at most"),
    ],
)
def test_each_obstacle_is_named(shape: dict[str, Any], how: dict[str, Any], obstacle: str) -> None:
    inputs = {"instance": TRN2, "sdk": SDK, **how}
    changed = replace(SHAPE, **shape)
    assert choose_experts("auto", SHAPE, TRN2, SDK).kind == "blockwise"
    found = choose_experts("auto", changed, **inputs)
    assert found == ("plain", f"the NKI Library's kernels cannot be had: {obstacle}")
    with pytest.raises(ConfigError, match="blockwise, but the NKI Library's kernels cannot be had"):
        choose_experts("blockwise", changed, **inputs)
    assert choose_experts("plain", SHAPE, TRN2, SDK).kind == "plain"


def test_kernels_are_those_of_the_library_or_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"backend\.experts=plain"):
        load()
    for name, module in nki_blockwise.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert load() == STAND_INS
