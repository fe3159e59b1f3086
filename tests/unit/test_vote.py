"""Checksums tell any change of one bit, and the vote names who differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Kernels
from nxtrain.backends.cpu import CpuKernels
from nxtrain.backends.kernels import PlainKernels
from nxtrain.mesh import Mesh
from nxtrain.train.vote import Dissent, Vote, checksums, factors
from tests.support.layers import random

FACTORS = factors(64)


class Narrow(CpuKernels):
    """Cuts every tensor after two rows."""

    def tiles(self, shapes: Any) -> Any:
        from nxtrain.backends.kernels import row_tiles

        return [[rows] for rows in row_tiles(shapes, 2)]


def of(tensor: Tensor, kernels: Kernels | None = None) -> int:
    return int(checksums({"w": tensor}, kernels or PlainKernels(), FACTORS).item())


def by_hand(tensor: Tensor) -> int:
    rows = tensor.float().reshape(tensor.shape[0], -1).numpy().view(np.int32)
    total = 0
    for i, row in enumerate(rows.tolist()):
        folded = [bits ^ (bits >> 16 & 0xFFFF) for bits in row]
        total += int(FACTORS[1, i]) * sum(int(FACTORS[0, j]) * bits for j, bits in enumerate(folded))
    return (total + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("shape", [(5, 7), (9,), (3, 2, 4), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_weighted_sum_of_the_bits_however_it_is_cut(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape).to(dtype)
    assert of(x) == of(x, CpuKernels()) == of(x, Narrow()) == by_hand(x)


def test_every_single_bit_counts() -> None:
    x = random(4, 8)
    sums = {of(x)}
    for bit in range(32):
        for place in (0, 5, 31):
            flipped = x.clone()
            flipped.view(-1).view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
            sums.add(of(flipped))
    assert len(sums) == 1 + 32 * 3


def test_entries_that_change_places_are_seen_in_rows_in_columns_and_across() -> None:
    x = random(6, 6)
    seen = {of(x), of(x.T.contiguous()), of(x.flip(0)), of(x.flip(1))}
    assert len(seen) == 4


def test_nothing_is_the_sum_of_a_rank_without_entries() -> None:
    assert of(torch.zeros(0, 3), CpuKernels()) == 0


class _Members:
    """A vote without ranks: only what names them."""

    def __init__(self, world: int, names: list[str]) -> None:
        self.mesh = Mesh.build(world, 0)
        self._state, self._tensors, self.axis = self, dict.fromkeys(names), self.mesh.dp


def said(columns: dict[str, list[int]]) -> list[str]:
    members: Any = _Members(len(next(iter(columns.values()))), list(columns))
    return [str(found) for found in Vote.dissents(members, torch.tensor(list(columns.values())).T)]


def test_the_minority_is_named_with_what_it_differs_in() -> None:
    assert said({"a": [1, 1, 1, 2], "b": [5, 5, 5, 5]}) == ["rank 3 differs from ranks 0, 1 and 2 in a"]
    assert said({"a": [1, 9, 1], "b": [5, 7, 5], "c": [3, 3, 3]}) == [
        "rank 1 differs from ranks 0 and 2 in a and 1 more tensors"
    ]
    assert said({"a": [1, 2, 1], "b": [5, 5, 7]}) == [
        "rank 1 differs from ranks 0 and 2 in a",
        "rank 2 differs from ranks 0 and 1 in b",
    ]
    assert said({"a": [1, 1, 1]}) == []


def test_without_a_majority_all_are_named() -> None:
    assert said({"a": [1, 2]}) == ["ranks 0 and 1 differ in a, and no majority tells which is right"]
    assert said({"a": [1, 1, 2, 2]}) == ["ranks 0, 1, 2 and 3 differ in a, and no majority tells which is right"]
    assert str(Dissent((1, 2), (0, 3, 4), ("a",))) == "ranks 1 and 2 differ from ranks 0, 3 and 4 in a"
