"""Start every rank of a run on this machine."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nxtrain.config.check import resolve
from nxtrain.config.load import load
from nxtrain.errors import ConfigError, Problem


@dataclass(frozen=True)
class Command:
    """A process to start.

    Args:
        argv: Program and arguments.
        env: Environment variables beside those inherited.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def __str__(self) -> str:
        """A line for a shell."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])


def render(path: Path, overrides: Sequence[str], nproc: int | None, environ: Mapping[str, str]) -> Command:
    """The command that trains on this machine.

    Args:
        path: Configuration file.
        overrides: `dotted.key=value` each.
        nproc: Number of ranks; None: as many as the degrees ask for.
        environ: Environment that the command inherits.

    Raises:
        ConfigError: The configuration cannot run on that many ranks of one machine.
    """
    loaded = load(path, overrides)
    config = loaded.config
    parallel = config.parallel
    nproc = nproc or parallel.tp * parallel.pp * max(parallel.dp, 1)
    resolve(loaded, world=nproc)
    if config.cluster.nodes > 1:
        reason = f"nodes={config.cluster.nodes}, but the target local is one machine"
        hint = "use cluster.nodes=1, or start `torchrun -m nxtrain train` on each node"
        raise ConfigError([Problem("cluster.nodes", reason, loaded.origins["cluster.nodes"], hint)])
    train = ("-m", "nxtrain", "train", str(path), *overrides)
    options = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={nproc}")
    agent = ("-m", "nxtrain.launch.torchrun", *options, f"--max-restarts={config.recovery.max_restarts}")
    # Ranks that each take all cores slow one another down many times over.
    env = {} if "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": str(max(1, _num_cores() // nproc))}
    return Command((sys.executable, *(agent if nproc > 1 else ()), *train), env)


def launch(path: Path, overrides: Sequence[str], nproc: int | None, dry_run: bool) -> None:
    """Become the process that trains, so that its signals and its exit code need no relay.

    Args:
        path: Configuration file.
        overrides: `dotted.key=value` each.
        nproc: Number of ranks; None: as many as the degrees ask for.
        dry_run: Only print the command.

    Raises:
        ConfigError: The configuration cannot run on that many ranks of one machine.
    """
    command = render(path, overrides, nproc, os.environ)
    print(command, flush=True)
    if not dry_run:
        os.execve(command.argv[0], command.argv, {**os.environ, **command.env})


def _num_cores() -> int:
    # The cores that this process may use, where the system tells: a cluster often grants a part of the machine.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
