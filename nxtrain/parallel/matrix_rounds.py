"""Assignment of whole matrices to ranks in rounds: in each round, each rank of a group owns at most one matrix.

Muon orthogonalizes whole matrices, of which each rank holds only some rows or columns. All matrices of a round have the
same shape, so that all ranks run the same program. The module is pure data and needs no torch; the memory and speed
estimates of `nxtrain plan` count its rounds too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nxtrain.common.mesh import Axis, divisors
from nxtrain.common.sharding import ShardSpec, row_cut

EXCHANGED_BYTES = 4
"""Bytes of one matrix entry when ranks exchange rows: float32."""


@dataclass(frozen=True)
class Round:
    """Matrices of one shape that the ranks of a group orthogonalize at the same time.

    Args:
        spec: Sharding of each of the matrices.
        owned: Name of the parameter that each rank of the group owns; empty for a rank without a matrix.
    """

    spec: ShardSpec
    owned: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Names of the parameters that are orthogonalized in this round."""
        return [name for name in self.owned if name]


def rounds_of(matrices: Mapping[str, ShardSpec], size: int) -> list[Round]:
    """Assign matrices to the ranks of a group round-robin, the most expensive shapes first.

    The round-robin order continues from one shape to the next. So the loads of two ranks differ by at most the cost of
    the most expensive matrix.

    Args:
        matrices: Sharding of each matrix, in an order that is equal on all ranks.
        size: Number of ranks of the group.
    """
    shapes: dict[object, list[str]] = {}
    for name, spec in matrices.items():
        shapes.setdefault((spec.shape, spec.dim, spec.segments), []).append(name)
    by_cost = sorted(shapes.values(), key=lambda names: -matrix_flops(matrices[names[0]]))
    rounds = []
    turn = 0
    for names in by_cost:
        for first in range(0, len(names), size):
            chosen = names[first : first + size]
            owned = [""] * size
            for index, name in enumerate(chosen):
                owned[(turn + index) % size] = name
            turn += len(chosen)
            rounds.append(Round(matrices[names[0]], tuple(owned)))
    return rounds


def num_helpers(replicas: int, holders: int, num_blocks: int) -> int:
    """Number of replicas that divide the matrices between them: the most for which every rank may own a matrix.

    Ranks without a matrix are sent zeros, which costs time and gains nothing.

    Args:
        replicas: Ranks that hold the same rows.
        holders: Ranks that together hold one copy of the matrices.
        num_blocks: Blocks of a pipeline stage, each with one matrix of each shape.
    """
    return max(number for number in divisors(replicas) if number == 1 or number * holders <= num_blocks)


def piece_shape(spec: ShardSpec, tp: Axis, shard_size: int) -> tuple[int, int]:
    """Shape of the padded rows of a matrix that a rank exchanges; equal on all ranks."""
    num_rows, num_columns = spec.local_shape(tp)
    return row_cut(num_rows, Axis("first", 0, (tuple(range(shard_size)),)))[1], num_columns


def exchanged_bytes(rounds: Sequence[Round], tp: Axis, shard_size: int, helpers: int) -> tuple[int, int]:
    """Bytes that a rank sends in a step to exchange the rows of whole matrices.

    Returns:
        Bytes sent to the ranks that hold other rows, and bytes sent to the replicas that share the matrices.
    """
    holders = shard_size * tp.size
    piece = sum(math.prod(piece_shape(round_.spec, tp, shard_size)) for round_ in rounds) * EXCHANGED_BYTES
    return 2 * (holders - 1) * piece, (helpers - 1) * holders * piece


def matrix_flops(spec: ShardSpec, steps: int = 1) -> int:
    """Floating-point operations of Newton-Schulz on each segment of a matrix: three products, in the smaller dimension.

    Args:
        spec: Sharding of the matrix, with its segments.
        steps: Number of Newton-Schulz steps.
    """
    total = 0
    for segment in spec.segments:
        small, large = sorted(spec.global_shape(segment))
        total += steps * (4 * small * small * large + 2 * small**3)
    return total
