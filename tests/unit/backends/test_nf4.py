"""NF4 against the paper's table in float64, against bitsandbytes, and cut into the parts of ranks."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nxtrain.backends.limits import NF4_GROUP as GROUP
from nxtrain.backends.nf4 import Packing, Part, whole_packing
from nxtrain.config.finetune import BLOCK
from nxtrain.plan.adapters import NF4_BYTES
from tests.support.lora import restored_by_bitsandbytes

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@cache
def normal_floats() -> Tensor:
    """The 16 values by quantiles of a normal distribution, 8 below zero and 9 from zero.

    Source: Dettmers et al. 2023 (arXiv:2305.14314) section 3 and appendix E; the offset is bitsandbytes'.
    """
    offset = 0.5 * ((1 - 1 / 30) + (1 - 1 / 32))
    points = torch.cat([torch.linspace(offset, 0.5, 9)[:-1], torch.linspace(offset, 0.5, 8)[:-1]]).double()
    quantiles = math.sqrt(2) * torch.erfinv(2 * points - 1)
    values = torch.cat([quantiles[:8], torch.zeros(1, dtype=torch.float64), -quantiles[8:]]).sort().values
    return values / values.abs().max()


def matrix(seed: int, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights of a normal distribution with a few outliers; a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator) * 0.05
    drawn.view(-1)[:: 4 * BLOCK + 1] *= 20
    drawn.view(-1)[:BLOCK] = 0
    return drawn.to(dtype)


@settings(max_examples=25)
@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 600), DTYPES)
def test_a_matrix_is_restored_as_by_bitsandbytes(seed: int, blocks: int, rows: int, dtype: torch.dtype) -> None:
    """Of rows that are not whole blocks, too."""
    columns = blocks * BLOCK // math.gcd(BLOCK, rows)
    if rows * columns > 60_000:
        rows = BLOCK
    whole = matrix(seed, (rows, columns), dtype)
    packing = whole_packing(whole.shape, dtype)
    packed = packing.pack([whole])
    assert (packed.shape, packed.dtype) == (packing.packed_shape, dtype)
    assert torch.equal(packing.restore(packed), restored_by_bitsandbytes(whole))


@pytest.mark.parametrize("seed", range(4))
def test_values_are_the_nearest_of_the_papers_table(seed: int) -> None:
    """A block's scale is within a step of its 8 bits; the weights are then the nearest values times that scale."""
    whole = matrix(seed, (96, 2 * BLOCK))
    packing = whole_packing(whole.shape, torch.float32)
    blocks = whole.double().view(-1, BLOCK)
    result = packing.restore(packing.pack([whole])).double().view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    bounds = (normal_floats()[1:] + normal_floats()[:-1]) / 2
    nearest = normal_floats()[torch.bucketize(blocks / largest.clamp(min=1e-38)[:, None], bounds)]
    scales = (result * nearest).sum(1) / nearest.square().sum(1).clamp(min=1e-38)
    torch.testing.assert_close(result, nearest * scales[:, None], rtol=0, atol=1e-6 * float(largest.max()))
    assert (scales - largest)[1:].abs().max() < 0.012 * largest.max()
    assert (result[0] == 0).all()


@settings(max_examples=25)
@given(st.integers(0, 99), st.sampled_from([2, 4]), st.integers(1, 5), st.integers(1, 5), DTYPES)
def test_parts_of_ranks_are_those_of_the_whole(seed: int, ranks: int, rows: int, cols: int, dtype: torch.dtype) -> None:
    """Rows of two stacked matrices, and columns of one; groups end inside parts."""
    one, other = matrix(seed, (ranks * rows * 32, cols * 96), dtype), matrix(seed + 1, (ranks * 2, cols * 96), dtype)
    wholes = [restored_by_bitsandbytes(item) for item in (one, other)]
    wide = matrix(seed, (rows * 30, ranks * cols * BLOCK), dtype)
    width = cols * BLOCK
    for rank in range(ranks):
        parts = [Part((len(item), item.shape[1]), 0, rank * len(item) // ranks, len(item) // ranks) for item in wholes]
        packing = Packing(tuple(parts), (sum(part.length for part in parts), one.shape[1]), dtype)
        expected = [whole.narrow(0, part.start, part.length) for whole, part in zip(wholes, parts, strict=True)]
        assert torch.equal(packing.restore(packing.pack([one, other])), torch.cat(expected))
        column = Packing((Part((len(wide), wide.shape[1]), 1, rank * width, width),), (len(wide), width), dtype)
        expected_columns = restored_by_bitsandbytes(wide).narrow(1, rank * width, width)
        assert torch.equal(column.restore(column.pack([wide])), expected_columns)


def test_a_weight_takes_the_planned_bytes() -> None:
    packing = whole_packing((GROUP, 4 * BLOCK * 16), torch.bfloat16)
    assert packing.packed_shape[0] * 2 == GROUP * 4 * BLOCK * 16 * NF4_BYTES + 4
