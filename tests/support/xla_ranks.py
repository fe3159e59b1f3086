"""Processes that are ranks, each with one XLA:CPU device, of a world that they pretend.

XLA:CPU joins no processes, so every process tells torch-xla the world and the rank that its variables tell of. The
process group and the group of the hosts are real, and the graphs are those of the ranks; none of them can run.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from nxtrain.common.process.placement import Placement
from tests.support.ports import patient_s
from tests.support.xla_processes import FAST, Ended, nxtrain, start

TIMEOUT_S = patient_s(200)
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
    environments = enumerate(_environments(world, store.port))
    ranks = [start(_play, job, env=env, log=folder / f"log-{rank}.txt") for rank, env in environments]
    ended = [rank.ended(TIMEOUT_S) for rank in ranks]
    assert [each.code for each in ended] == [0] * world, "\n\n".join(each.printed[-6000:] for each in ended)
    return [json.loads((folder / f"result-{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def command_ranks(world: int, *argv: object, folder: Path) -> list[Ended]:
    """Run a command of nxtrain on some ranks, each with a CPU device of its own; the end of each.

    Args:
        world: Processes.
        argv: Arguments of the command.
        folder: For what the ranks print.
    """
    store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    environments = enumerate(_environments(world, store.port))
    ranks = [nxtrain(*argv, env=env, log=folder / f"log-{rank}.txt") for rank, env in environments]
    return [rank.ended(TIMEOUT_S) for rank in ranks]


def _environments(world: int, port: int) -> list[dict[str, str]]:
    """Variables of each rank: those of torchrun's agent, and one CPU device."""
    shared: dict[str, object] = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "test"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": "True", **ONE_DEVICE}
    places = ({**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(world))
    return [{**os.environ, **{name: str(value) for name, value in place.items()}} for place in places]


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
