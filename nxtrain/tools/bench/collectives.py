"""Speed of nxtrain's collectives between processes of this machine by size, next to a copy in memory, in rounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.process.document import write_document
from nxtrain.common.process.progress import Progress
from nxtrain.tools.bench.turns import BenchWorker, machine, machine_line, median_ratio, rank_environments

KIB, GIB = 1 << 10, 1 << 30

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send", "copy")
"""Collectives and transfers; and the floor, a copy of the tensor in one process's memory."""

# Bounds of the repetitions of one size in one turn.
TURN_BYTES = 64 << 20
MOST_REPEATS = 50
LEAST_REPEATS = 2


@dataclass(frozen=True)
class CollectivesJob:
    """Sizes to measure.

    Args:
        ranks: Processes.
        sizes_kib: KiB of the whole tensor, bfloat16: what is reduced, gathered, cut or sent.
    """

    ranks: int
    sizes_kib: Sequence[int]

    def repeats(self, kib: int) -> int:
        """Repetitions of a size in one turn."""
        return max(LEAST_REPEATS, min(MOST_REPEATS, TURN_BYTES // (kib * KIB)))


def bench_collectives(*, job: CollectivesJob, rounds: int, as_json: bool) -> None:
    """Measure and print.

    Args:
        job: Sizes.
        rounds: Turns, after one that warms up.
        as_json: Print JSON instead of a table.

    Raises:
        ConfigError: An odd number of ranks, or a size that is not a multiple of the ranks.
    """
    if job.ranks % 2:
        reason = f"{job.ranks} ranks are an odd number, and each sends to one other"
        raise ConfigError([Problem("--ranks", reason, hint="use 2 or another even number")])
    bad = [kib for kib in job.sizes_kib if kib < 1 or kib * KIB % (2 * job.ranks)]
    if bad or not job.sizes_kib:
        reason = f"{', '.join(map(str, bad)) or 'no size'}: sizes are KiB that {job.ranks} ranks can share"
        raise ConfigError([Problem("--sizes-kib", reason, hint="use 4,64,1024,16384")])
    result = {"machine": machine(), **asdict(job), "rounds": rounds, **summarize(measure(job, rounds))}
    if as_json:
        write_document(result)
    else:
        _show(result)


def measure(job: CollectivesJob, rounds: int) -> list[list[Any]]:
    """Seconds of each rank in each round, by operation, size and clock."""
    turns = []
    with ExitStack() as stack, Progress("starting", rounds + 1) as progress:
        workers = []
        for rank, env in enumerate(rank_environments(job.ranks)):
            worker = BenchWorker("nxtrain.tools.bench.collectives_rank", str(rank), json.dumps(asdict(job)), env)
            workers.append(stack.enter_context(worker))
        for number in range(rounds + 1):
            progress.show(number, f"round {number} of {rounds}")
            for worker in workers:
                worker.begin()
            turns.append([json.loads(worker.end()) for worker in workers])
    return turns[1:]


def summarize(turns: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds of the slowest rank's wall time, and of the CPU time of all ranks.

    Args:
        turns: In each round, of each rank, mean seconds by operation, size in KiB and clock.
    """
    rows = []
    for op, sizes in turns[0][0].items():
        for kib in sizes:
            wall, cpu = [], []
            for ranks in turns:
                wall.append(max(rank[op][kib]["wall"] for rank in ranks))
                cpu.append(sum(rank[op][kib]["cpu"] for rank in ranks))
            speeds = [int(kib) * KIB / GIB / seconds for seconds in wall]
            rows.append(
                {
                    "name": f"{op}/{kib}",
                    "op": op,
                    "kib": int(kib),
                    "value": median(speeds),
                    "unit": "GiB/s",
                    "rounds": speeds,
                    "wall_s": median(wall),
                    "cpu_s": median(cpu),
                }
            )
    least = min(row["kib"] for row in rows)
    floor = {row["kib"]: row["rounds"] for row in rows if row["op"] == "copy"}
    return {
        "rows": rows,
        "ratios": {row["name"]: median_ratio(row["rounds"], floor[row["kib"]]) for row in rows if row["op"] != "copy"},
        "latency_s": {row["op"]: row["wall_s"] for row in rows if row["kib"] == least},
    }


def _show(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(machine_line(result["machine"]), markup=False)
    table = Table(title=f"{result['ranks']} ranks, bfloat16", title_style="bold")
    table.add_column("")
    for head in ("KiB", "GiB/s", "of a copy", "ms", "CPU ms, all ranks"):
        table.add_column(head, justify="right")
    for row in result["rows"]:
        share = f"{result['ratios'][row['name']]:.1%}" if row["name"] in result["ratios"] else ""
        times = (f"{1e3 * row['wall_s']:.3f}", f"{1e3 * row['cpu_s']:.3f}")
        table.add_row(row["op"], str(row["kib"]), f"{row['value']:.2f}", share, *times)
    table.caption = (
        "GiB/s of the whole tensor by the slowest rank's wall time; ms of the least size are the latency; "
        f"medians over {result['rounds']} rounds"
    )
    console.print(table)
