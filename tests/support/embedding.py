"""Gradients of the embedding beside exact sums, for tokens of drawn frequencies."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.sharding import Init
from nxtrain.nn.init import materialize
from nxtrain.parallel.embedding import VocabEmbedding
from nxtrain.parallel.regions import TensorParallel
from tests.support.models import ALONE

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding."""

WIDTH = 6


def frequent_tokens(rng: Random) -> tuple[int, Tensor]:
    """Size of a vocabulary, and tokens (S, B) of which some ids come thousands of times, and others never."""
    vocab_size = rng.choice((1, 3, 40, 500))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    shape = rng.choice((1, 7, 900, 3000)), rng.choice((1, 2))
    frequencies = 1.0 / torch.arange(1, vocab_size + 1) ** rng.choice((0.5, 1.0, 2.0))
    number = shape[0] * shape[1]
    return vocab_size, torch.multinomial(frequencies, number, replacement=True, generator=generator).view(shape)


def wrong_gradients(parallel: TensorParallel, put: Callable[[Tensor], Tensor], draws: int) -> list[str]:
    """Draws whose gradient differs from a sum in float64 by more than one rounding, and the rounding of float32."""
    rng, wrong = Random(0), []
    for _ in range(draws):
        vocab_size, tokens = frequent_tokens(rng)
        with torch.device("meta"):
            layer = VocabEmbedding(vocab_size, WIDTH, Init(), parallel)
        materialize(layer, put, None)
        out = layer(put(tokens))
        grad = (torch.randn(out.shape) + rng.choice((0.0, 1.0))).to(parallel.dtype)
        out.backward(put(grad))
        assert layer.weight.grad is not None
        actual = layer.weight.grad.cpu()
        zeros, rows = torch.zeros(vocab_size, WIDTH, dtype=torch.float64), grad.flatten(0, 1).double()
        exact, sizes = (zeros.index_add(0, tokens.flatten(), x) for x in (rows, rows.abs()))
        error = (actual.double() - exact).abs()
        bound = HALF_ULP[parallel.dtype] * exact.abs() + 1e-5 * sizes
        if actual.dtype != parallel.dtype or not bool((error <= bound).all()):
            wrong.append(f"{tuple(tokens.shape)} tokens of {vocab_size}, {parallel.dtype}")
    return wrong


def wrong_on_device(backend: Backend, draws: int) -> list[str]:
    """The same on a device, in bfloat16."""
    parallel = TensorParallel(ALONE, backend.collectives, backend.kernels, torch.bfloat16)
    return wrong_gradients(parallel, backend.put, draws)
