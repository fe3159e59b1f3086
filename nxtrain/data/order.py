"""Endless shuffled order of the training rows, by a permutation for each epoch that is computed instead of stored.

A Feistel network permutes a * b positions, slightly more than the number of rows. A result beyond the last row is
permuted again until it is a row (cycle walking). Memory is O(1). The result depends on seed and position only, not on
the number of ranks or on earlier reads.

Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 (cycle walking) and 5 (generalized
Feistel); the round function is the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_UInt64s = NDArray[np.uint64]

_NUM_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15


def shuffled(positions: NDArray[np.integer[Any]], num_rows: int, seed: int) -> NDArray[np.int64]:
    """Row indices at positions of the endless order; epoch e covers positions [e * num_rows, (e + 1) * num_rows).

    Args:
        positions: (n,) positions, 0 or greater.
        num_rows: Number of rows. Every epoch has each row exactly once.
        seed: Any integer. Each seed and each epoch has its own permutation.
    """
    epoch, rows = np.divmod(positions.astype(np.uint64), np.uint64(num_rows))
    key = _mix(_mix(np.array([seed % 2**64], np.uint64)) + epoch)
    rows = _permute(rows, key, num_rows)
    outside = rows >= num_rows
    while outside.any():
        rows[outside] = _permute(rows[outside], key[outside], num_rows)
        outside = rows >= num_rows
    return rows.astype(np.int64)


def _permute(x: _UInt64s, key: _UInt64s, num_rows: int) -> _UInt64s:
    """Permute [0, a * b) with the key of each element, where num_rows <= a * b < num_rows + a."""
    root = math.isqrt(num_rows - 1) + 1
    a, b = np.uint64(root), np.uint64(-(-num_rows // root))
    left, right = np.divmod(x, b)
    for number in range(1, _NUM_ROUNDS + 1):
        round_key = key + np.uint64(_GOLDEN * number % 2**64)
        if number % 2:
            left = (left + _mix(right ^ round_key) % a) % a
        else:
            right = (right + _mix(left ^ round_key) % b) % b
    permuted: _UInt64s = left * b + right
    return permuted


def _mix(x: _UInt64s) -> _UInt64s:
    """Mix the bits of each 64-bit element by a bijective hash."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x
