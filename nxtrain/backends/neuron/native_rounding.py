"""Stochastic rounding on TorchNeuron: three software implementations, checked bitwise before use.

Rounding needs bitcasts, shifts and wrapping 32-bit products. AWS's operator list does not guarantee exact results for
them. The first implementation whose bits equal the host's is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from nxtrain.backends.rounding import mix_, round_by_pairs, round_one_by_one, step_hash
from nxtrain.common.kernels import RoundingKey

Rounder = Callable[[Tensor, Tensor, RoundingKey, Tensor], None]
"""Implementation of `Kernels.stochastic_round`."""

ROWS, COLUMNS = 64, 33
"""Shape of the tensor that checks an implementation; the odd number of columns leaves half of a pair."""

STEPS = (1.0, 7.0, 4096.0)


def round_by_views(x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
    """Round stochastically on the device with eager operations."""
    round_one_by_one(x, out, key, step, bitcast=torch.Tensor.view)


def round_in_graph(x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
    """Round stochastically on the device in a compiled graph, whose compiler supports bitcasts."""
    out.copy_(_compiled()(x, key.rows, key.columns, key.odd, step).to(out.dtype))


def round_on_host(x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
    """Round stochastically on the host, with copies to the host and back: slow, but correct on any device."""
    host = torch.empty(out.shape, dtype=out.dtype)
    round_by_pairs(x.detach().cpu(), host, _put(key, Tensor.cpu), step.cpu())
    out.copy_(host)


IMPLEMENTATIONS: dict[str, Rounder] = {
    "by operations of the device": round_by_views,
    "in a compiled graph": round_in_graph,
    "on the host, with a copy of every parameter there and back in each step": round_on_host,
}
"""Implementations of stochastic rounding by their names in messages, fastest first."""


def choose_rounder(put: Callable[[Tensor], Tensor]) -> tuple[Rounder, str]:
    """Choose the first correct implementation of stochastic rounding; return a log message about the choice too.

    Args:
        put: Function that copies a host tensor to the device.
    """
    defects: list[str] = []
    for name, way in IMPLEMENTATIONS.items():
        defect = _defect(way, put)
        if not defect:
            why = f"; not {'; not '.join(defects)}" if defects else ""
            return way, f"stochastic rounding {name}, as its bits are those of the host{why}"
        defects.append(f"{name}: {defect}")
    raise AssertionError(f"rounding on the host differs from itself: {defects}")


def hardware_rounds(put: Callable[[Tensor], Tensor]) -> bool:
    """True if the device rounds casts stochastically: equal values between two bfloat16 numbers round to both."""
    between = put(torch.full((4096,), 1.0 + 2.0**-9))
    return len(set(between.to(torch.bfloat16).float().cpu().tolist())) > 1


def _defect(way: Rounder, put: Callable[[Tensor], Tensor]) -> str:
    """Describe the difference between an implementation's bits on the device and the host's; empty if equal."""
    x, key = _sample(), _key()
    wrong = 0
    try:
        for number in STEPS:
            wanted = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
            actual = put(torch.zeros(ROWS, COLUMNS).bfloat16())
            step = torch.tensor(number)
            round_by_pairs(x, wanted, key, step_hash(step))
            way(put(x), actual, _put(key, put), step_hash(put(step)))
            wrong += int((actual.cpu().view(torch.int16) != wanted.view(torch.int16)).sum())
    # The device lacks an operation or type, or its compiler refuses the graph; the message of the run tells which.
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return f"{wrong} of {len(STEPS) * ROWS * COLUMNS} entries differ" if wrong else ""


def _sample() -> Tensor:
    """Float32 test numbers of all magnitudes and both signs, with zeros, subnormals and infinities, without NaN.

    The bits of a NaN may differ between devices without harm.
    """
    bits = mix_(torch.arange(ROWS * COLUMNS, dtype=torch.int32))
    values = bits.view(torch.float32).view(ROWS, COLUMNS).clone()
    values[values.isnan()] = 1.0 + 2.0**-9
    for row, value in enumerate((0.0, -0.0, 1e-45, float("inf"), -float("inf"), torch.finfo(torch.float32).max)):
        values[row, 0] = value
    # A device may flush subnormal numbers to zero in other operations; rounding must keep their bits.
    return values


def _key() -> RoundingKey:
    columns = torch.arange(COLUMNS, dtype=torch.int32)
    hashes = mix_(columns // 2)
    rows = mix_(torch.arange(ROWS, dtype=torch.int32)) | 1
    return RoundingKey(rows, hashes[::2].contiguous(), hashes, columns % 2 == 1, begins_odd=False, shared=True)


def _put(key: RoundingKey, put: Callable[[Tensor], Tensor]) -> RoundingKey:
    return RoundingKey(put(key.rows), put(key.pairs), put(key.columns), put(key.odd), key.begins_odd, key.shared)


def _rounded(x: Tensor, rows: Tensor, columns: Tensor, odd: Tensor, step: Tensor) -> Tensor:
    out = torch.empty_like(x)
    key = RoundingKey(rows, columns, columns, odd, begins_odd=False, shared=True)
    round_one_by_one(x, out, key, step, bitcast=torch.Tensor.view)
    return out


@lru_cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_rounded, backend="neuron", dynamic=False, fullgraph=True)
