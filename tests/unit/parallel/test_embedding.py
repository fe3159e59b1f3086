"""Gradients of the embedding in 16 bits are sums in float32 that are rounded once, for drawn frequencies of tokens."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.common.sharding import Init
from nxtrain.parallel.embedding import VocabEmbedding
from tests.support.models import ALONE, alone, filled

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding."""


def drawn_tokens(rng: Random) -> tuple[int, Tensor]:
    """Size of a vocabulary, and tokens (S, B) of which some ids come thousands of times, and others never."""
    vocab_size = rng.choice((1, 3, 40, 500))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    shape = rng.choice((1, 7, 900, 3000)), rng.choice((1, 2))
    frequencies = 1.0 / torch.arange(1, vocab_size + 1) ** rng.choice((0.5, 1.0, 2.0))
    number = shape[0] * shape[1]
    return vocab_size, torch.multinomial(frequencies, number, replacement=True, generator=generator).view(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_row_is_rounded_once(dtype: torch.dtype) -> None:
    rng = Random(0)
    for _ in range(20):
        vocab_size, tokens = drawn_tokens(rng)
        with torch.device("meta"):
            layer = VocabEmbedding(vocab_size, 6, Init(), alone(dtype, CpuKernels()))
        weight = torch.randn(vocab_size, 6).to(dtype)
        layer = filled(layer, ALONE, {"": weight})
        out = layer(tokens)
        assert torch.equal(out, weight[tokens])
        grad = (torch.randn(out.shape) + rng.choice((0.0, 1.0))).to(dtype)
        out.backward(grad)
        actual = layer.weight.grad
        assert actual is not None and actual.dtype == dtype
        zeros = torch.zeros(vocab_size, 6, dtype=torch.float64)
        exact = zeros.index_add(0, tokens.flatten(), grad.flatten(0, 1).double())
        summed = zeros.index_add(0, tokens.flatten(), grad.flatten(0, 1).double().abs())
        error = (actual.double() - exact).abs()
        assert (error <= HALF_ULP[dtype] * exact.abs() + 1e-5 * summed).all(), (vocab_size, tokens.shape)
