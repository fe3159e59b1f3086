"""Checks of collectives: ranks that do not join are named, and latency and bandwidth of the links are measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxtrain.common.errors import ConfigError
from nxtrain.common.machines import GPU, NEURON, Machine
from nxtrain.common.text import listed
from nxtrain.launch.local import rendezvous_address
from nxtrain.tools.doctor.finding import Finding, Host, ToolError, fault, passed
from nxtrain.tools.doctor.outputs import Bandwidth, ToolOutputError, parse_nccl_network, parse_nccom_test

LIMIT_S = 30.0  # timeout in seconds with which ranks wait for each other
MEASURE_S = 15.0  # seconds beyond `LIMIT_S` in which ranks import torch and measure, before they are killed
MIN_SHARE = 0.1  # a link counts as broken below this share of its bandwidth; healthy links reach far more

NCCOM = ("nccom-test", "--minbytes", "1kb", "--maxbytes", "64mb", "--stepfactor", "256", "--datatype", "fp32")
NCCL_LINES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
SOCKETS = "Socket"
"""Name of TCP in NCCL's log; aws-ofi-nccl is `Libfabric`, or `AWS Libfabric` in older releases."""

WHY = "the first collective of a run would wait for its time limit, and end the run"


@dataclass(frozen=True)
class World:
    """Machines whose links are checked together, with one rank per machine."""

    first_node: str
    port: int
    rank: int
    size: int
    names: tuple[str, ...] = ()  # name of each machine by rank; empty: unknown

    def name(self, rank: int) -> str:
        """Name of the machine with a rank, for messages; `rank N` if the machines' names are unknown."""
        if len(self.names) != self.size:
            return f"rank {rank}"
        return f"{self.names[rank]} (rank {rank})"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of this machine's rank, as torchrun sets them."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_PORT": str(self.port),
            "GROUP_RANK": str(self.rank),
            "GROUP_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.first_node,
        }


def world_of(first_node: str, rank: int, size: int, host: Host | None = None) -> World:
    """Build the world of machines that check their links together, with machine names from Slurm if available.

    Args:
        first_node: Address of rank 0's machine, `NAME` or `NAME:PORT`.
        rank: Rank of this machine.
        size: Number of machines.

    Raises:
        ConfigError: The rank or the address is invalid.
    """
    name, port = rendezvous_address(first_node)
    if rank >= size:
        raise ConfigError(f"--rank {rank} is too high for --world {size} machines; ranks are 0 to {size - 1}")
    try:
        names = tuple(((host or Host()).run("scontrol", "show", "hostnames") or "").split())
    except ToolError:  # not in a Slurm job
        names = ()
    return World(name, port, rank, size, names)


def check_collectives(
    host: Host, machine: Machine | None, world: World | None, limit_s: float = LIMIT_S
) -> Iterator[Finding]:
    """Check the links within this machine, or between the machines of a world."""
    gpus: Machine | None = None
    backend = "cpu"
    if machine is not None and machine.resource == GPU:
        gpus = machine
        backend = "auto"
    if machine is not None and machine.resource == NEURON:
        yield _nccom(host, machine)
    elif world is None:
        yield from _loopback(gpus, backend, limit_s)
    if world is not None:
        (result,) = _run_ranks([world.environment], backend, limit_s)
        yield _judge("collectives", [result], world.size, world.name, None)
        yield from _network([result], gpus)


def _network(results: Sequence[Mapping[str, Any]], machine: Machine | None) -> Iterator[Finding]:
    """Check that NCCL uses the EFA devices of a GPU machine, if NCCL's log names its network."""
    networks = sorted({result["network"] for result in results if result.get("network")})
    if machine is None or not machine.efa_devices or not networks:
        return
    what = f"NCCL takes {listed(networks)}"
    if SOCKETS not in networks:
        yield passed("network", what)
        return
    why = f"{machine.name} has EFA, but collectives between machines would go through TCP at a fraction of the speed"
    fix = "put /opt/amazon/ofi-nccl of AWS's EFA installer on LD_LIBRARY_PATH; look for libnccl-net.so there"
    yield fault("network", what, why, fix)


def _loopback(machine: Machine | None, backend: str, limit_s: float) -> Iterator[Finding]:
    """Check collectives between processes of this machine: one process per GPU, or two without GPUs."""
    size = 2
    if machine is not None:
        size = machine.accelerators
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    local = {"LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    environments = [
        {**World("127.0.0.1", port, rank, size).environment, **local, "LOCAL_RANK": str(rank)} for rank in range(size)
    ]
    results = _run_ranks(environments, backend, limit_s)
    yield _judge("loopback", results, size, lambda rank: f"rank {rank}", machine)
    yield from _network(results, machine)


def _nccom(host: Host, machine: Machine) -> Finding:
    try:
        text = host.run(*NCCOM, "--nworkers", str(machine.devices), "allr", limit_s=LIMIT_S)
        if text is None:
            why, fix = "the links between chips cannot be tested", "install aws-neuronx-tools"
            return fault("loopback", "nccom-test is not installed", why, fix)
        rows = parse_nccom_test(text)
    except (ToolError, ToolOutputError) as error:
        return fault("loopback", str(error), WHY, "see the processes and driver above; reboot, then replace the node")
    return _judge_links("loopback", rows, machine, f"{machine.devices} NeuronCores")


def _run_ranks(environments: Sequence[Mapping[str, str]], backend: str, limit_s: float) -> list[dict[str, Any]]:
    """Start one process per rank, and return the result of each.

    In a result, `error` is set if the process died. `network` is the network in NCCL's log, empty if NCCL was not used.
    """
    program = (sys.executable, "-m", "nxtrain.tools.doctor.collectives_rank", backend, str(limit_s))
    started = [
        subprocess.Popen(
            program,
            env={**os.environ, **NCCL_LINES, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    limit = time.monotonic() + limit_s + MEASURE_S
    results = []
    for process in started:
        try:
            out, err = process.communicate(timeout=max(0.1, limit - time.monotonic()))
            answers = [line for line in out.splitlines() if line.startswith("{")]  # NCCL prints there as well
            results.append({**json.loads(answers[-1]), "network": parse_nccl_network(out)})
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            results.append({"missing": [], "error": f"no end within {limit_s + MEASURE_S:g} seconds", "rows": []})
        except (ValueError, IndexError):
            last = (err.strip().splitlines() or [f"ended with {process.returncode}"])[-1]
            results.append({"missing": [], "error": last, "rows": []})
    return results


def _judge(
    name: str, results: Sequence[Mapping[str, Any]], size: int, name_of: Callable[[int], str], machine: Machine | None
) -> Finding:
    errors = list(dict.fromkeys(result["error"] for result in results if result["error"]))
    missing = sorted(set().union(*(result["missing"] for result in results)))
    if missing:
        what = f"{len(missing)} of {size} did not arrive: {listed([name_of(rank) for rank in missing])}"
        if errors:
            what += f" ({'; '.join(errors)})"
        fix = "start this check on all machines at once; then look at the named ones: name, firewall, security group"
        return fault(name, what, WHY, fix)
    if errors:
        return fault(name, listed(errors), WHY, "bring the loopback interface up; reinstall torch")
    rows = []
    for number, (size_bytes, _) in enumerate(results[0]["rows"]):
        seconds = max(result["rows"][number][1] for result in results)
        rows.append(Bandwidth(size_bytes, seconds, 2 * (size - 1) / size * size_bytes / seconds))
    return _judge_links(name, rows, machine, f"{size} ranks on {results[0].get('device', 'unknown')}")


def _judge_links(name: str, rows: Sequence[Bandwidth], machine: Machine | None, who: str) -> Finding:
    best = max(row.bus_bytes_s for row in rows)
    what = f"{who}: {rows[0].time_s * 1e6:.0f} us for {rows[0].size_bytes} bytes, {best / 1e9:.2f} GB/s"
    link = 0.0
    if machine is not None:
        link = machine.link_bytes_s
    if link:
        what += f" of {link / 1e9:.0f} GB/s"
    if best < MIN_SHARE * link:
        return fault(name, what, "one slow link slows every step of every rank", "reboot, then replace the node")
    return passed(name, what)
