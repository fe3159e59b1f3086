"""Processes that are ranks, each with one XLA:CPU device, of a world that they pretend.

XLA:CPU joins no processes, so every process tells torch-xla the world and the rank that its variables tell of. The
process group and the group of the hosts are real, and the graphs are those of the ranks; none of them can run.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from nxtrain.process.placement import Placement
from tests.support.patience import patient_s
from tests.support.xla_processes import FAST, start

TIMEOUT_S = patient_s(200)
AGENT = ("--standalone", "--local-addr=127.0.0.1")
ONE_DEVICE = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "OMP_NUM_THREADS": "1", "XLA_FLAGS": FAST}


def run_ranks(world: int, body: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """Call `body(place, *args)` in each process and return what each returned, by rank, as JSON carries it.

    This process holds the store of the ranks, as torchrun's agent does, and sets the variables that the agent sets.

    Args:
        world: Processes.
        body: Importable by name, like what it is given.
        args: Its arguments.
        folder: For the files that carry arguments and results.
    """
    job = folder / "job.pickle"
    job.write_bytes(pickle.dumps((body, args)))
    store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    shared |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "test"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": "True", **ONE_DEVICE}
    ranks = []
    for rank in range(world):
        place = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        ranks.append(start(_play, job, env={**os.environ, **place}, log=folder / f"log-{rank}.txt"))
    ended = [rank.ended(TIMEOUT_S) for rank in ranks]
    assert [each.code for each in ended] == [0] * world, "\n\n".join(each.printed[-6000:] for each in ended)
    return [json.loads((folder / f"result-{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def torchrun(world: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program under torchrun on some ranks, each with a CPU device of its own."""
    command = [sys.executable, "-m", "nxtrain.launch.torchrun", *AGENT, f"--nproc-per-node={world}", *argv]
    env = {**os.environ, **ONE_DEVICE}
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def pretend(place: Placement) -> None:
    """Tell torch-xla the world that it would find on devices that join."""
    import torch_xla.runtime as xr

    xr._WORLD_SIZE, xr._ORDINAL = place.world, place.rank


def _play(job: Path) -> None:
    """Run a job file."""
    body, args = pickle.loads(job.read_bytes())
    place = Placement.read()
    pretend(place)
    torch.set_num_threads(1)
    found = json.dumps(body(place, *args))
    (job.parent / f"result-{place.rank}.json").write_text(found, encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the runtime's threads do not join
