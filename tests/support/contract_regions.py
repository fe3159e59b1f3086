"""Cases of `tests.support.contract` for the collectives that autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from torch import Tensor

from nxtrain.parallel.regions import _GatherSequence, _ReduceGradient, _ReduceSum, _ScatterSequence
from tests.support.contract import Operand, Work

if TYPE_CHECKING:
    from tests.support.contract_functions import Ranks


def gather_sequence(ranks: Ranks, rng: Random) -> Work:
    """Parts of a sequence, put together."""
    return _region(ranks, rng, _GatherSequence, lambda x: ranks.gathered(ranks.heard(x)))


def scatter_sequence(ranks: Ranks, rng: Random) -> Work:
    """A sum, cut along the sequence."""
    # `TensorParallel.exit` may overwrite it, but this one does not.
    return _region(ranks, rng, _ScatterSequence, ranks.scattered)


def reduce_gradient(ranks: Ranks, rng: Random) -> Work:
    """A value whose gradient is summed."""
    return _region(ranks, rng, _ReduceGradient, ranks.heard)


def reduce_sum(ranks: Ranks, rng: Random) -> Work:
    """A sum, in place."""
    return _region(ranks, rng, _ReduceSum, ranks.summed, written=True)


def _region(
    ranks: Ranks, rng: Random, function: type, exact: Callable[[Tensor], Tensor], written: bool = False
) -> Work:
    shape = ranks.draw_shape(rng, rng.choice((1, 4)))

    def call(x: Tensor) -> Tensor:
        x = x.contiguous() if written else x  # a sum in place takes what a product has just made
        return function.apply(x, ranks.comm, ranks.axis)  # type: ignore[attr-defined,no-any-return]

    label = f"{function.__name__} on {shape}, tp {ranks.axis.size}"
    return Work(label, {"x": Operand(shape, written=written)}, call, exact, in_float64=ranks.axis.size == 1)
