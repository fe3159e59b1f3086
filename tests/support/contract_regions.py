"""Cases of `tests.support.contract` for the collectives that autograd differentiates, and for lookups."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.common.mesh import Axis, StateAxes
from nxtrain.parallel.embedding import _WideLookup
from nxtrain.parallel.graph_sharding import UnitShards, _GatherUnit
from nxtrain.parallel.precision import Precision
from nxtrain.parallel.regions import _GatherSequence, _ReduceGradient, _ReduceSum, _ScatterSequence
from tests.support.contract import Operand, Work

if TYPE_CHECKING:
    from tests.support.contract_functions import Ranks


IN_FLOAT32 = Precision(torch.float32, torch.float32, torch.float32, "fp32", torch.float32)


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


def gather_unit(ranks: Ranks, rng: Random) -> Work:
    """Parameters of a unit, made whole from the rows of each rank."""
    shapes = [(rng.choice((1, 2, 3)), 4), (rng.choice((1, 2)),)]
    rows = [ranks.axis.size * shape[0] - rng.choice((0, ranks.axis.size - 1)) for shape in shapes]
    alone = Axis("replica", 0, ((0,),))
    how = UnitShards(tuple(rows), StateAxes(ranks.axis, ranks.axis, alone), ranks.comm, IN_FLOAT32)

    def call(matrix: Tensor, vector: Tensor) -> Tensor:
        whole = _GatherUnit.apply(how, matrix, vector)
        return torch.cat([tensor.flatten() for tensor in whole])

    def exact(matrix: Tensor, vector: Tensor) -> Tensor:
        # The gradient of each rank's rows is a mean over the ranks, which all have the same gradients.
        whole = [ranks.gathered(x)[:number] for x, number in zip((matrix, vector), rows, strict=True)]
        return torch.cat([tensor.flatten() for tensor in whole])

    label = f"_GatherUnit on {shapes} over {ranks.axis.size}"
    return Work(label, {"matrix": Operand(shapes[0]), "vector": Operand(shapes[1])}, call, exact)


def lookup(ranks: Ranks, rng: Random) -> Work:
    """Rows of a matrix by their numbers."""
    shape, num_rows = ranks.draw_shape(rng, rng.choice((1, 4))), rng.choice((1, 2, 9))

    def tokens(generator: torch.Generator, drawn: tuple[int, ...]) -> Tensor:
        return torch.randint(num_rows, drawn, generator=generator)

    operands = {"tokens": Operand(shape[:-1], tokens, has_gradient=False), "weight": Operand((num_rows, shape[-1]))}
    reads = rng.random() < 0.5
    label = f"_WideLookup of {shape} in {num_rows} rows, reads {reads}"
    return Work(label, operands, lambda tokens, weight: _WideLookup.apply(tokens, weight, reads), F.embedding)


def _region(
    ranks: Ranks, rng: Random, function: type, exact: Callable[[Tensor], Tensor], written: bool = False
) -> Work:
    shape = ranks.draw_shape(rng, rng.choice((1, 4)))

    def call(x: Tensor) -> Tensor:
        x = x.contiguous() if written else x  # a sum in place takes what a product has just made
        return function.apply(x, ranks.comm, ranks.axis)  # type: ignore[attr-defined,no-any-return]

    label = f"{function.__name__} on {shape}, tp {ranks.axis.size}"
    return Work(label, {"x": Operand(shape, written=written)}, call, exact, in_float64=ranks.axis.size == 1)


REGION_CASES: dict[type, Callable[[Ranks, Random], Work]] = {
    _GatherSequence: gather_sequence,
    _GatherUnit: gather_unit,
    _ScatterSequence: scatter_sequence,
    _ReduceGradient: reduce_gradient,
    _ReduceSum: reduce_sum,
    _WideLookup: lookup,
}
"""By function."""
