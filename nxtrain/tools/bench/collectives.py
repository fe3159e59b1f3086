"""Benchmark of nxtrain's collectives by tensor size, between ranks of one machine.

Each round also measures a copy in memory as the reference. Each rank is a process, on CPUs or with a device of its own.
On a device, the device's clock measures the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend, BackendSettings
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.tools.bench import harness
from nxtrain.tools.bench.clocks import clocks_of
from nxtrain.tools.bench.harness import PATIENCE_S, measure_concurrently, median_ratio, start_ranks, take_turns
from nxtrain.tools.bench.train import CLOCKS, ON_HOST, check_backend

KIB, GIB = 1 << 10, 1 << 30

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send", "copy")
"""Measured operations: collectives, a point-to-point send, and as reference a tensor copy within one process."""

# Bounds of the repetitions of one tensor size in one measurement.
TURN_BYTES = 64 << 20
MOST_REPEATS = 50
LEAST_REPEATS = 2


@dataclass(frozen=True)
class CollectivesJob:
    """Number of ranks, tensor sizes and backend of a collectives benchmark."""

    ranks: int
    sizes_kib: Sequence[int]  # sizes in KiB of the whole bfloat16 tensor that is reduced, gathered, scattered or sent
    backend: str = "cpu"

    def repeats(self, kib: int) -> int:
        """Number of repetitions of a tensor size in one measurement.

        A device queues the repetitions, and one read at the end waits for all of them. So a device always gets the
        maximum.
        """
        if self.backend not in ON_HOST:
            return MOST_REPEATS
        return max(LEAST_REPEATS, min(MOST_REPEATS, TURN_BYTES // (kib * KIB)))


def bench_collectives(*, job: CollectivesJob, rounds: int, as_json: bool) -> None:
    """Measure the speed of nxtrain's collectives and print the results."""
    if job.ranks % 2:
        reason = f"{job.ranks} ranks are an odd number, but sends run between pairs of ranks"
        raise ConfigError([Problem("--ranks", reason, hint="use 2 or another even number")])
    bad = [kib for kib in job.sizes_kib if kib < 1 or kib * KIB % (2 * job.ranks)]
    if bad or not job.sizes_kib:
        reason = f"{', '.join(map(str, bad)) or 'no size'}: each size in KiB must divide evenly into {job.ranks} ranks"
        raise ConfigError([Problem("--sizes-kib", reason, hint="use 4,64,1024,16384")])
    devices = check_backend(job.backend, eager=True)
    with ExitStack() as stack:
        workers = start_ranks(stack, "collectives", "rank", asdict(job), job.ranks)
        measured = take_turns({"collectives": lambda: measure_concurrently(workers)}, rounds)["collectives"]
    result = {"machine": harness.machine(), "devices": devices, **asdict(job), "rounds": rounds, **summarize(measured)}
    harness.present(result, lambda: [_table(result)], as_json=as_json)


def turns(_: str, job: Mapping[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Make the function that measures all collectives on one rank, in a worker process.

    The function returns the mean seconds of each operation, by tensor size and clock.
    """
    work = CollectivesJob(**job)
    torch.set_num_threads(1)
    backend = open_backend(work.backend, BackendSettings(hang_timeout_s=PATIENCE_S))
    clocks = clocks_of(backend)
    mesh = Mesh.build(work.ranks, backend.rank, pp=work.ranks)
    backend.lay_out(mesh)

    def turn() -> dict[str, Any]:
        means: dict[str, Any] = {}
        for op in OPERATIONS:
            means[op] = {}
            for kib in work.sizes_kib:
                # One row for each rank, so that ranks can shard the tensor. Zeros stay finite if an operation
                # overwrites its input.
                size = work.ranks, kib * KIB // (2 * work.ranks)
                whole = torch.zeros(size, dtype=torch.bfloat16, device=backend.device)
                act = _operation(op, whole, backend, mesh.pp)
                repeats = work.repeats(kib)
                act()  # warms up
                clocks.read(whole[0, 0])
                backend.collectives.barrier()
                with clocks.measure() as seconds:
                    for _ in range(repeats):
                        act()
                    clocks.read(whole[0, 0])
                means[op][str(kib)] = {clock: elapsed / repeats for clock, elapsed in seconds.items()}
        return means

    return {"": turn}


def _operation(op: str, whole: Tensor, backend: Backend, axis: Axis) -> Callable[[], object]:
    comm, spare = backend.collectives, torch.empty_like(whole)
    mine = whole[:1].clone()

    def send() -> None:
        """Send from each even rank to the next rank, which receives."""
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


def summarize(turns: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Median speed and time of each operation and tensor size.

    The time of a round is that of the slowest rank, by the device's clock or else wall time. The CPU time of a round is
    the sum over all ranks.
    """
    rows = []
    clock = "wall"
    for op, sizes in turns[0][0].items():
        for kib, by_clock in sizes.items():
            clock = "device" if "device" in by_clock else "wall"
            slowest, cpu = [], []
            for ranks in turns:
                slowest.append(max(rank[op][kib][clock] for rank in ranks))
                cpu.append(sum(rank[op][kib]["cpu"] for rank in ranks))
            speeds = [int(kib) * KIB / GIB / seconds for seconds in slowest]
            times = {f"{clock}_s": median(slowest), "cpu_s": median(cpu)}
            rows.append(harness.row(f"{op}/{kib}", "GiB/s", speeds, op=op, kib=int(kib), **times))
    least = min(row["kib"] for row in rows)
    floor = {row["kib"]: row["rounds"] for row in rows if row["op"] == "copy"}
    return {
        "clock": clock,
        "rows": rows,
        "ratios": {row["name"]: median_ratio(row["rounds"], floor[row["kib"]]) for row in rows if row["op"] != "copy"},
        "latency_s": {row["op"]: row[f"{clock}_s"] for row in rows if row["kib"] == least},
    }


def _table(result: Mapping[str, Any]) -> Table:
    rows = []
    clock = result["clock"]
    for row in result["rows"]:
        share = f"{result['ratios'][row['name']]:.1%}" if row["name"] in result["ratios"] else ""
        times = (f"{1e3 * row[f'{clock}_s']:.3f}", f"{1e3 * row['cpu_s']:.3f}")
        rows.append((row["op"], str(row["kib"]), f"{row['value']:.2f}", share, *times))
    caption = (
        f"GiB/s of the whole tensor by the slowest rank, by {CLOCKS[clock]}; ms of the least size are the latency; "
        f"medians over {result['rounds']} rounds"
    )
    heads = ("", "KiB", "GiB/s", "of a copy", "ms", "CPU ms, all ranks")
    return harness.table(f"{result['ranks']} ranks, bfloat16", heads, rows, caption)
