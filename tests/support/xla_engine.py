"""Several XLA:CPU devices in one process, one thread each, with real collectives between them.

XLA:CPU matches the participants of a collective by the compiled module, so those that meet must run the very same one:
one thread at a time compiles, and who comes later with the same graph finds its module in the cache of the process. A
rank that builds another graph never meets the others, and XLA ends the process after ten seconds: hence each run has a
process of its own, which is a fork (see `tests.support.xla_processes`).
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.neuron_machine import INSTANCE, furnish, stand_on

if TYPE_CHECKING:
    from nxtrain.backends.xla.backend import XlaBackend
import json

import torch
from torch.distributed import TCPStore

from nxtrain.common.process.placement import Placement
from tests.support.processes import AGENT_STORE, Ended, patient_s, rank_variables
from tests.support.xla_processes import FAST, nxtrain, start

RANKS_TIMEOUT_S = patient_s(200)
ONE_DEVICE = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "OMP_NUM_THREADS": "1", "XLA_FLAGS": FAST}


def run_ranks(world: int, body: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """Call `body(place, *args)` in each process and return what each returned, by rank, as JSON carries it.

    This process holds the store of the ranks, as torchrun's agent does, and sets the variables that the agent sets.
    """
    job = folder / "job.pickle"
    job.write_bytes(pickle.dumps((body, args)))
    store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    environments = enumerate(_environments(world, store.port))
    ranks = [start(_play, job, env=env, log=folder / f"log-{rank}.txt") for rank, env in environments]
    ended = [rank.ended(RANKS_TIMEOUT_S) for rank in ranks]
    assert [process.code for process in ended] == [0] * world, "\n\n".join(process.printed[-6000:] for process in ended)
    return [json.loads((folder / f"result-{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def command_ranks(world: int, *argv: object, folder: Path) -> list[Ended]:
    """Run a command of nxtrain on some ranks, each with a CPU device of its own; the end of each."""
    store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    environments = enumerate(_environments(world, store.port))
    ranks = [nxtrain(*argv, env=env, log=folder / f"log-{rank}.txt") for rank, env in environments]
    return [rank.ended(RANKS_TIMEOUT_S) for rank in ranks]


def _environments(world: int, port: int) -> list[dict[str, str]]:
    """Variables of each rank: those of torchrun's agent, and one CPU device."""
    node = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "test"}
    shared = {**os.environ, **node, "TORCHELASTIC_RESTART_COUNT": "0", **AGENT_STORE, **ONE_DEVICE}
    return [{**shared, **rank_variables(rank, world, port)} for rank in range(world)]


def pretend(placement: Placement) -> None:
    """Tell torch-xla the world that it would find on devices that join."""
    import torch_xla.runtime as xr

    xr._WORLD_SIZE, xr._ORDINAL = placement.world, placement.rank


def _play(job: Path) -> None:
    body, args = pickle.loads(job.read_bytes())
    placement = Placement.read()
    pretend(placement)
    torch.set_num_threads(1)
    result = json.dumps(body(placement, *args))
    (job.parent / f"result-{placement.rank}.json").write_text(result, encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the runtime's threads do not join


TIMEOUT_S = patient_s(200)


def run_devices(
    world: int,
    body: Callable[..., Any],
    *args: Any,
    folder: Path,
    flags: str = FAST,
    neuron: Mapping[str, str] | None = None,
    instance: str = INSTANCE,
) -> list[Any]:
    """Call `body(backend, *args)` on each device of a fresh process and return what each returned, by rank."""
    done = start_devices(world, body, *args, folder=folder, flags=flags, neuron=neuron, instance=instance)
    assert done.code == 0, done.printed[-6000:]
    return pickle.loads(_result(folder, world).read_bytes())  # type: ignore[no-any-return]


def start_devices(
    world: int,
    body: Callable[..., Any],
    *args: Any,
    folder: Path,
    flags: str = FAST,
    neuron: Mapping[str, str] | None = None,
    instance: str = INSTANCE,
) -> Ended:
    """`run_devices` of a process that need not end well."""
    job = folder / f"job-{world}.pickle"
    machine = None
    if neuron is not None:
        machine = folder / "machine"
        furnish(machine, instance)
    job.write_bytes(pickle.dumps((body, args, machine)))
    pool = str(16 * world)  # a collective that waits keeps its thread
    env = {
        **os.environ,
        **(neuron or {}),
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(world),
        "XLA_FLAGS": flags,
        "XLA_ENABLE_PARAM_ALIASING": "0",  # rank 0 would wait for donated buffers, which wait for the others
        "XLA_THREAD_POOL_SIZE": pool,
        "NPROC": pool,
    }
    return start(_main, job, _result(folder, world), env=env, log=folder / f"log-{world}.txt").ended(TIMEOUT_S)


def _result(folder: Path, world: int) -> Path:
    return folder / f"result-{world}.pickle"


class Devices:
    """The threads of one process.

    They meet on the host, since torch-xla's own rendezvous is a collective that each of them would compile.
    """

    def __init__(self, world: int, machine: Path | None = None) -> None:
        self._compiling = threading.Lock()
        self._meeting = threading.Barrier(world)
        self._machine = machine

    def meet(self) -> None:
        self._meeting.wait(TIMEOUT_S)

    def sync(self) -> None:
        """Step boundary: run what this thread recorded, by a module that no other thread compiles as well."""
        import torch_xla
        import torch_xla.core.xla_model as xm

        # A new graph starts when the last one of its device has ended, for which others may have to come here first. So
        # that is waited for outside the lock, and within it nobody waits for anybody.
        xm.wait_device_ops(xm.xla_real_devices([torch_xla.device()]))
        with self._compiling:
            torch_xla.sync()

    def run(self, body: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        import torch_xla
        import torch_xla.core.xla_model as xm
        from torch_xla._internal import pjrt

        from nxtrain.backends.xla.graphs import freeze_older_objects

        backend = self._backend()

        def join(local_rank: int, local_world_size: int) -> None:
            pjrt._initialize_single_process(local_rank, local_world_size)
            # Without it the world has size 1 and every collective is skipped in silence.
            xm.set_replication(torch_xla.device(), xm.get_xla_supported_devices())

        def play() -> Any:
            try:
                return body(backend(sync=self.sync, meet=self.meet), *args)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)  # else the others wait for this rank

        # Here and not by a rank: what other ranks have made by then would be hidden from them.
        freeze_older_objects()
        results = pjrt._run_thread_per_device(0, 1, play, join)
        return [results[rank] for rank in sorted(results)]

    def _backend(self) -> type[XlaBackend]:
        if self._machine is None:
            from nxtrain.backends.xla.backend import XlaBackend

            return XlaBackend
        from nxtrain.backends.neuron.backend import NeuronBackend

        stand_on(self._machine)
        return NeuronBackend


def _main(job: Path, result: Path) -> None:
    body, args, machine = pickle.loads(job.read_bytes())
    devices = Devices(int(os.environ["CPU_NUM_DEVICES"]), machine)
    result.write_bytes(pickle.dumps(devices.run(body, args)))
    sys.stdout.flush()
    os._exit(0)  # the runtime's threads do not join
