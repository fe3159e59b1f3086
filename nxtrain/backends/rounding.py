"""Stochastic rounding to bfloat16 with counter-based random bits, in integer operations that every device has.

The 16 bits that round an entry depend only on the seed, the step, the global name of the entry's tensor and the entry's
position in the tensor. They do not depend on the layout, the device or earlier draws. The hash of a row and
a step, combined with the hash of a pair of columns, gives 32 bits. The low half rounds the even column, and the high
half rounds the odd column.

Shapes: R rows, the first dimension; C columns, all other dimensions flattened. P pairs cover the columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nxtrain.common.kernels import RoundingKey

# A Python number would make torch-xla compare in float64, which Trainium does not have.
_LARGEST = torch.tensor(torch.finfo(torch.float32).max)


def _int32(number: int) -> Tensor:
    # A Python number would cost a conversion in every call, and torch-xla 2.9 turns a shift by a number into a
    # division, which rounds negative numbers the other way.
    return torch.tensor(number, dtype=torch.int32)


_FIFTEEN, _SIXTEEN, _17_BITS, _16_BITS, _HIGH_HALF = map(_int32, (15, 16, 0x1FFFF, 0xFFFF, -0x10000))
_FACTORS = _int32(0x7FEB352D), _int32(0x846CA68B - (1 << 32))


def step_hash(step: Tensor) -> Tensor:
    """Hash a step number: () float32 to () int32, odd."""
    return mix_(step.to(torch.int32, copy=True)) | 1


def mix_(x: Tensor) -> Tensor:
    """Hash int32 numbers in place by a bijection; products wrap around.

    Source: C. Wellons, hash-prospector, `lowbias32`.
    """
    _mix_hashes_(_fold_(x))
    return _fold_(x)


def _mix_hashes_(x: Tensor) -> Tensor:
    """Middle step of the hash `mix_`, in place.

    This step alone is enough to combine hashes, since rounding depends most on the high bits of each half.
    """
    x *= _FACTORS[0]
    x ^= torch.bitwise_right_shift(x, _FIFTEEN) & _17_BITS
    x *= _FACTORS[1]
    return x


def folded(x: Tensor) -> Tensor:
    """Mix the high half of int32 numbers into the low half, a bijection."""
    return x ^ (torch.bitwise_right_shift(x, _SIXTEEN) & _16_BITS)


def _fold_(x: Tensor) -> Tensor:
    x ^= torch.bitwise_right_shift(x, _SIXTEEN) & _16_BITS
    return x


def random_bits(rows: Tensor, columns: Tensor, step: Tensor) -> Tensor:
    """Draw 32 random bits for each row and column from their hashes: (R,), (C,), () to (R, C) int32."""
    return _mix_hashes_((rows * step).unsqueeze(1) ^ columns)


def _round_by_pairs_(x: Tensor, key: RoundingKey, step: Tensor) -> Tensor:
    """Round finite float32 `x` stochastically to bfloat16 values, in place; the result for other values is undefined.

    Each half of a hash rounds one entry. The device must be little endian.
    """
    rows = x.view(len(key.rows), -1)
    halves = random_bits(key.rows, key.pairs, step).view(torch.uint16)
    if key.alone:
        halves = halves[:, ::2]
    else:
        halves = halves.narrow(1, int(key.begins_odd), rows.shape[1])
    bits = rows.view(torch.int32)
    bits += halves.to(torch.int32)
    bits &= _HIGH_HALF
    return x


def round_by_pairs(x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
    """Round stochastically (`Kernels.stochastic_round`) without a wait of the host for the device."""
    rounded = _round_by_pairs_(x.clone(), key, step)
    out.copy_(torch.where(x.abs() <= _LARGEST, rounded, x))


def round_by_pairs_on_host(x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
    """Round stochastically (`Kernels.stochastic_round`) on the host, faster if all entries are finite.

    A finite sum proves that all entries are finite.
    """
    if math.isfinite(x.sum().item()):
        out.copy_(_round_by_pairs_(x, key, step))
    else:
        round_by_pairs(x, out, key, step)


def round_one_by_one(
    x: Tensor, out: Tensor, key: RoundingKey, step: Tensor, bitcast: Callable[[Tensor, torch.dtype], Tensor]
) -> None:
    """Round stochastically (`Kernels.stochastic_round`) with one hash per entry, and `bitcast` instead of views."""
    # Not by sizes: a compiler of dynamic shapes could not prove that they match `x`, and would make several kernels.
    rows = x.unsqueeze(1) if x.dim() == 1 else x.flatten(1)
    words = random_bits(key.rows, key.columns, step)
    noise = torch.where(key.odd, torch.bitwise_right_shift(words, _SIXTEEN), words) & _16_BITS
    bits = (bitcast(rows, torch.int32) + noise) & _HIGH_HALF
    rounded = torch.where(rows.abs() <= _LARGEST, bitcast(bits, torch.float32), rows)
    out.copy_(rounded.squeeze(1) if x.dim() == 1 else rounded.view(out.shape))
