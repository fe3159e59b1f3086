"""A rank without memory ends, says so to the others, and the next start goes on; and none is lost to leaks."""

from __future__ import annotations

import re
import resource
import threading
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import command_ranks, runs
from tests.support.command_ranks import Ranks
from tests.support.commands import at_batch, ended, start_rank, trained, write_config
from tests.support.processes import free_port
from tests.support.runs import course

STEPS = 12
LEAK_MIB_PER_100_STEPS = 1.0


def together(folder: Path, armed: str) -> tuple[list[int | None], dict[int, str]]:
    port = free_port()
    processes = {number: start_rank(folder, number, port, armed=armed) for number in range(2)}
    output = ended(folder, processes, 60.0)
    return [process.exitcode for process in processes.values()], output


@pytest.mark.parametrize("point", ["fwd", "opt"])
def test_a_rank_without_memory_is_named_by_the_others(tmp_path: Path, point: str) -> None:
    straight = tmp_path / "straight"
    write_config(straight, steps=STEPS)
    codes, output = together(straight, "")
    assert codes == [0, 0], output
    write_config(tmp_path, steps=STEPS)
    codes, output = together(tmp_path, f"oom@1:7:{point}")
    assert codes == [1, 1], output
    assert "MemoryError: injected" in output[1]
    assert "rank 1 failed: MemoryError: injected" in output[0], output[0]
    codes, output = together(tmp_path, f"oom@1:7:{point}")
    assert codes == [0, 0], output
    assert course(tmp_path / "run") == course(straight / "run")


def _numpy() -> object:
    return np.ones(1 << 30, np.uint8)


def _torch() -> object:
    return torch.ones(1 << 30, dtype=torch.uint8)


def _allocate_beyond_limit(allocate: Any) -> None:
    with open("/proc/self/statm", encoding="utf-8") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    allocate()


@pytest.mark.parametrize(("allocate", "says"), [(_numpy, "Unable to allocate 1.00 GiB"), (_torch, "allocate memory")])
def test_a_reader_without_address_space_ends_the_run_which_goes_on_later(
    tmp_path: Path, straight: list[dict[str, Any]], allocate: Any, says: str
) -> None:
    write_config(tmp_path, steps=STEPS)
    # A background save starts threads, which Python may await until the hang limit (see `start_daemon`).
    at_limit = partial(at_batch, 7, partial(_allocate_beyond_limit, allocate))
    output = trained(tmp_path, "checkpoint.async=false", first=at_limit, code=1)
    assert says in output
    held = re.search(r"error: rank 0 is out of memory; it holds parameters (\S+) [KM]iB, gradients", output)
    assert held, output
    assert float(held[1]) > 0
    assert "rank 0: keys that would help: " in output
    report = tmp_path / "run" / "logs" / "memory-rank-0.txt"
    assert report.read_text(encoding="utf-8").splitlines()[0] in output
    trained(tmp_path)
    assert course(tmp_path / "run") == straight


def _no_thread_begins() -> None:
    def _bootstrap(self: threading.Thread) -> None:
        raise MemoryError

    threading.Thread._bootstrap = _bootstrap  # type: ignore[attr-defined]
    raise MemoryError("no room for a batch")


@pytest.mark.timeout(40)
def test_a_rank_whose_threads_die_before_they_begin_ends_at_once(tmp_path: Path) -> None:
    """`Thread.start` waits for ever for such a thread, and the run would end at a limit of 60 seconds."""
    write_config(tmp_path, steps=STEPS)
    output = trained(tmp_path, "checkpoint.async=false", first=partial(at_batch, 7, _no_thread_begins), code=1)
    assert "no room for a batch" in output


def anonymous_mib(pid: int | None) -> float:
    """Memory of a process that no file backs, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) / 1024


def num_entries(pid: int | None, folder: str) -> int:
    """Number of a process's threads, in `task`, or open files, in `fd`."""
    return len(list(Path(f"/proc/{pid}/{folder}").iterdir()))


@pytest.mark.timeout(180)
def test_memory_threads_and_files_stay_what_they_are(started_by: ForkServerContext, tmp_path: Path) -> None:
    """Two ranks with 50 checkpoints in the background: the slope over 250 steps."""
    model = {**runs.TINY["model"], "config": {"num_hidden_layers": 1}}
    command_ranks.write_config(tmp_path, steps=100_000, every=5, model=model)
    steps = range(50, 301, 25)
    mib: list[list[float]] = []
    seen: list[list[tuple[int, int]]] = []
    with Ranks(started_by, tmp_path) as ranks:
        pids = [process.pid for process in ranks.processes]
        for step in steps:
            readings = []
            for number in range(step, step + 20, 4):
                ranks.await_steps(number)
                readings.append([anonymous_mib(pid) for pid in pids])
            # A checkpoint under way holds a copy of the state, and the least reading has none.
            mib.append([min(of_rank) for of_rank in zip(*readings, strict=True)])
            seen.append([(num_entries(pid, "task"), num_entries(pid, "fd")) for pid in pids])
    assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) >= 2
    for rank in range(2):
        threads, files = zip(*(at[rank] for at in seen), strict=True)
        slope = 100 * float(np.polyfit(steps, [at[rank] for at in mib], 1)[0])
        assert slope < LEAK_MIB_PER_100_STEPS, (slope, mib)
        # Those of a checkpoint under way come and go.
        assert max(threads) - min(threads) <= 2, threads
        assert max(files) - min(files) <= 4, files
