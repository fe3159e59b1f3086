"""A process of `nxtrain bench collectives`: one rank, a turn for each line on standard input.

python -m nxtrain.tools.bench.collectives_rank RANK JOB
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend, BackendSettings
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.tools.bench.clocks import Clocks
from nxtrain.tools.bench.collectives import KIB, OPERATIONS, CollectivesJob
from nxtrain.tools.bench.turns import serve

PATIENCE_S = 600.0


def main(job: CollectivesJob) -> None:
    """Serve turns until standard input ends."""
    torch.set_num_threads(1)

    def make() -> dict[str, Callable[[], dict[str, dict[str, dict[str, float]]]]]:
        backend = open_backend("cpu", BackendSettings(hang_timeout_s=PATIENCE_S))
        mesh = Mesh.build(job.ranks, backend.rank, pp=job.ranks)
        backend.lay_out(mesh)
        return {"": lambda: turn(job, backend, mesh.pp)}

    serve(make)


def turn(job: CollectivesJob, backend: Backend, axis: Axis) -> dict[str, dict[str, dict[str, float]]]:
    """Mean seconds of each operation at each size, by clock."""
    clocks = Clocks(backend.device)
    means = {}
    for op in OPERATIONS:
        means[op] = {str(kib): _mean(op, kib, job, backend, axis, clocks) for kib in job.sizes_kib}
    return means


def _mean(op: str, kib: int, job: CollectivesJob, backend: Backend, axis: Axis, clocks: Clocks) -> dict[str, float]:
    repeats = job.repeats(kib)
    # Rows, so that they can be cut between the ranks; an operation may overwrite its input, which stays finite.
    whole = torch.zeros(axis.size, kib * KIB // (2 * axis.size), dtype=torch.bfloat16)
    act = _operation(op, whole, backend, axis)
    act()
    backend.collectives.barrier()
    with clocks.measure() as seconds:
        for _ in range(repeats):
            act()
    return {clock: elapsed / repeats for clock, elapsed in seconds.items()}


def _operation(op: str, whole: Tensor, backend: Backend, axis: Axis) -> Callable[[], object]:
    comm, spare = backend.collectives, torch.empty_like(whole)
    mine = whole[:1].clone()

    def send() -> None:
        """One way along a ring of pairs: even positions send to the next, which receive."""
        if axis.rank % 2 == 0:
            comm.start_send(whole, axis, axis.rank + 1).wait()
        else:
            comm.start_receive(whole, axis, axis.rank - 1).wait()

    acts: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(whole, axis),
        "all_gather": lambda: comm.all_gather(mine, axis),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, axis),
        "send": send,
        "copy": lambda: spare.copy_(whole),
    }
    return acts[op]


if __name__ == "__main__":
    main(CollectivesJob(**json.loads(sys.argv[2])))
