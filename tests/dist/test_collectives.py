"""Every collective over every kind of axis, against the same operation on tensors that one process holds together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.distributed.collectives import RowCounts
from nxtrain.common.mesh import Axis, Mesh
from tests.support.models import random
from tests.support.ranks import RankPool

Results = dict[str, Tensor]

DTYPES = [torch.float32, torch.bfloat16]
TRANSPORTS = ["gloo", "shared_memory"]


def held_by(rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Input of a rank: small integers, so that sums are exact in every type and order."""
    return random(*shape, seed=rank, scale=4.0).round().to(dtype)


def number_of_rows(sender: int, receiver: int, axis: Axis) -> int:
    """Rows that one position of an axis sends to another; some send none, also to themselves."""
    return (5 * sender + 3 * receiver) % 4 if axis.size > 1 else 2


def row_counts(axis: Axis) -> RowCounts:
    """Rows of an all-to-all of blocks of different sizes."""
    every = range(axis.size)
    sent = tuple(number_of_rows(axis.rank, other, axis) for other in every)
    return RowCounts(sent, tuple(number_of_rows(other, axis.rank, axis) for other in every))


def block_of(rank: int, axis: Axis, sender: int, receiver: int, dtype: torch.dtype) -> Tensor:
    """Block that a rank, at the position `sender`, sends to a position."""
    return held_by(100 * rank + receiver, number_of_rows(sender, receiver, axis), 3, dtype=dtype)


def blocks_of(rank: int, axis: Axis, dtype: torch.dtype) -> Tensor:
    """All blocks that a rank sends, one after the other."""
    return torch.cat([block_of(rank, axis, axis.rank, receiver, dtype) for receiver in range(axis.size)])


def axes(world: int, rank: int) -> dict[str, Axis]:
    mesh = Mesh.build(world, rank, tp=2)
    return {"tp": mesh.tp, "dp": mesh.dp, "all": mesh.all, "neighbours": mesh.all.neighbours(2)}


def collect(backend: CpuBackend, transport: str, dtype: torch.dtype) -> dict[str, Results]:
    backend.choose_transport(transport)
    comm = backend.collectives
    results = {}
    for name, axis in axes(backend.world, backend.rank).items():
        vector, matrix = (held_by(backend.rank, *shape, dtype=dtype) for shape in ((3,), (axis.size * 2, 3)))
        bucket = comm.start_all_reduce_bucket([vector, matrix], axis, torch.float32, scale=0.5).wait()
        waiting = comm.start_all_reduce(matrix.clone(), axis)
        results[name] = {
            "sum": comm.all_reduce(vector.clone(), axis),
            "max": comm.all_reduce(vector.clone(), axis, "max"),
            "all_gather": comm.all_gather(matrix.clone(), axis),
            "reduce_scatter": comm.reduce_scatter(matrix.clone(), axis),
            "all_to_all": comm.all_to_all(matrix.clone(), axis),
            "rows": comm.all_to_all(blocks_of(backend.rank, axis, dtype), axis, row_counts(axis)),
            "started": waiting.wait(),
            "scattered": comm.start_reduce_scatter(matrix.clone(), axis, scale=0.5).wait(),
            "bucket_vector": bucket[0],
            "bucket_matrix": bucket[1],
        }
    comm.barrier()
    return results


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_collectives_combine_what_the_ranks_of_an_axis_hold(
    ranks: RankPool, world: int, dtype: torch.dtype, transport: str
) -> None:
    for rank, by_axis in enumerate(ranks.run(world, collect, transport, dtype)):
        for name, axis in axes(world, rank).items():
            group = next(group for group in axis.groups if rank in group)
            vectors = torch.stack([held_by(member, 3, dtype=dtype) for member in group])
            matrices = torch.stack([held_by(member, axis.size * 2, 3, dtype=dtype) for member in group])
            scale = 0.5 if axis.size > 1 else 1.0
            expected = {
                "sum": vectors.sum(0),
                "max": vectors.amax(0),
                "all_gather": matrices.flatten(0, 1),
                "reduce_scatter": matrices.sum(0).unflatten(0, (axis.size, 2))[axis.rank],
                "all_to_all": matrices.unflatten(1, (axis.size, 2))[:, axis.rank].flatten(0, 1),
                "rows": torch.cat(
                    [block_of(member, axis, sender, axis.rank, dtype) for sender, member in enumerate(group)]
                ),
                "started": matrices.sum(0),
                "scattered": matrices.sum(0).unflatten(0, (axis.size, 2))[axis.rank] * scale,
                "bucket_vector": vectors.float().sum(0) * scale,
                "bucket_matrix": matrices.float().sum(0) * scale,
            }
            for operation, tensor in by_axis[name].items():
                assert tensor.dtype == (torch.float32 if "bucket" in operation else dtype)
                assert torch.equal(tensor, expected[operation]), (rank, name, operation)
