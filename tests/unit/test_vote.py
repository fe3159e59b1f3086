"""Checksums tell any change of one bit, and the vote names who differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.train.health.replica_check import Holders, ReplicaMismatch, checksums, factors, minority
from tests.support.models import random

FACTORS = factors(64)


class Narrow(CpuKernels):
    def tiles(self, shapes: Any) -> Any:
        from nxtrain.backends.torch_kernels import row_tiles

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
        for index in (0, 5, 31):
            flipped = x.clone()
            flipped.view(-1).view(torch.int32)[index] ^= -(2**31) if bit == 31 else 1 << bit
            sums.add(of(flipped))
    assert len(sums) == 1 + 32 * 3


def test_entries_that_change_places_are_seen_in_rows_in_columns_and_across() -> None:
    x = random(6, 6)
    seen = {of(x), of(x.T.contiguous()), of(x.flip(0)), of(x.flip(1))}
    assert len(seen) == 4


def test_nothing_is_the_sum_of_a_rank_without_entries() -> None:
    assert of(torch.zeros(0, 3), CpuKernels()) == 0


def said(columns: dict[str, list[int]]) -> list[str]:
    """Finding on the checksums of some tensors, each held by all ranks of a world."""
    results: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, sums in columns.items():
        if sides := minority(range(len(sums)), sums):
            results.setdefault(sides, []).append(name)
    return [str(ReplicaMismatch(apart, others, tuple(names))) for (apart, others), names in results.items()]


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
    assert str(ReplicaMismatch((1, 2), (0, 3, 4), ("a",))) == "ranks 1 and 2 differ from ranks 0, 3 and 4 in a"


def test_rows_that_do_not_count_are_no_part_of_a_sum() -> None:
    x, counts = random(5, 3), torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32)
    some = torch.where(counts.bool().unsqueeze(1), x, 0.0)

    def result(tensor: Tensor, kernels: Kernels) -> int:
        return int(checksums({"w": tensor}, kernels, FACTORS, {"w": counts}).item())

    assert result(x, PlainKernels()) == result(x, Narrow()) == of(some) != of(x)


@pytest.mark.parametrize(
    ("holders", "ranks"),
    [
        (Holders(tied=False, copies=1, replicas=2), (5, 7)),
        (Holders(tied=True, copies=1, replicas=1), (5, 1)),
        (Holders(tied=True, copies=1, replicas=2), (5, 7, 1, 3)),
        (Holders(tied=False, copies=2, replicas=1), (4, 5)),
        (Holders(tied=False, copies=2, replicas=2), (4, 6, 5, 7)),
    ],
)
def test_who_holds_the_same_follows_from_the_mesh(holders: Holders, ranks: tuple[int, ...]) -> None:
    """Rank 5 of pp=2 x dp=2 x tp=2: what `all_gather` over tp puts together, place by place."""
    mesh = Mesh.build(8, 5, tp=2, pp=2)
    assert holders.ranks(mesh, mesh.dp) == ranks


def test_a_minority_is_counted_however_its_ranks_are_ordered() -> None:
    assert minority((4, 6, 1, 3), (7, 7, 9, 7)) == ((1,), (3, 4, 6))
    assert minority((4, 1), (7, 9)) == ((1, 4), ())
    assert minority((4, 1), (7, 7)) is None
