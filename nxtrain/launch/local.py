"""Launch of all ranks of a run on this machine, alone or together with other machines."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nxtrain.backends import device_support
from nxtrain.common.errors import BackendError, ConfigError, Problem
from nxtrain.common.process import stacks
from nxtrain.config.bounds import quoted
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import Loaded, load
from nxtrain.config.model_folder import KEY, with_commit
from nxtrain.config.schema import RunConfig
from nxtrain.launch.debug import agent_settings, debug_variables
from nxtrain.launch.environment import CUBLAS_WORKSPACE, QUIET_PROFILER, Variable, with_shell_values
from nxtrain.launch.gpu import gpu_variables
from nxtrain.launch.neuron import is_neuron, needs
from nxtrain.launch.threads import thread_variables

AGENT = ("-m", "nxtrain.launch.torchrun")

FIRST_NODE = "FIRST_NODE"
"""Placeholder for the name of the first node, in commands that are rendered before the cluster assigns nodes."""

PORT = 29500
"""Default port of the rendezvous between machines, equal to torchrun's default."""

MAX_PORT = 65_535


@dataclass(frozen=True)
class Command:
    """Command line of a training process, with its environment variables.

    Args:
        argv: Arguments of the process.
        variables: Environment variables to add, each with its reason.
        about: Notes for a user who starts the command by hand.
        plan: Checked configuration; None if it has problems.
        problems: Reasons why the command cannot run.
    """

    argv: tuple[str, ...]
    variables: tuple[Variable, ...] = ()
    about: tuple[str, ...] = ()
    plan: Resolved | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def env(self) -> dict[str, str]:
        """Values of the environment variables by name."""
        return {variable.name: variable.value for variable in self.variables}

    def __str__(self) -> str:
        """Format the command as a shell script, with comments."""
        lines: list[str] = []
        for note in self.about:
            lines += [f"# {line}" for line in note.splitlines()]
        for variable in self.variables:
            reason = variable.reason
            if variable.source:
                reason += f" [{variable.source}]"
            lines += [f"# {line}" for line in reason.splitlines()]
            lines.append(f"export {variable.name}={shlex.quote(variable.value)}")
        return "\n".join([*lines, shlex.join(self.argv)])


def launch(
    path: Path, overrides: Sequence[str], nproc: int | None, dry_run: bool, first_node: str = "", min_nodes: int = 0
) -> None:
    """Start the run on this machine by exec: the training process replaces this process.

    So signals and the exit code need no relay.

    Args:
        path: Configuration file.
        overrides: Values that win over the file's.
        nproc: Ranks per machine; None for the number that the degrees require.
        dry_run: Only print the environment and the command, even for a configuration that cannot run yet.
        first_node: Value of --first-node; empty for one machine.
        min_nodes: Smallest number of machines; 0 for all machines.

    Raises:
        ConfigError: The configuration cannot run on that many ranks.
        BackendError: This machine lacks the devices of the run.
    """
    loaded = load(path, overrides)
    if dry_run:
        first_node = first_node or FIRST_NODE
    command = render(loaded, path, overrides, nproc, os.environ, first_node=first_node, min_nodes=min_nodes)
    if dry_run:
        print(command, flush=True)
    if command.problems:
        raise ConfigError(command.problems)
    if dry_run:
        return
    name = loaded.config.backend.name
    devices = device_support(name, {**os.environ, **command.env})
    if not devices.ok:  # each rank would fail in the same way, after minutes of imports
        elsewhere = "--dry-run and --target need no device"
        raise BackendError(f"backend.name={name} cannot run here: {devices.reason}\n    {elsewhere}")
    print(command, flush=True)
    signal.signal(stacks.DUMP, signal.SIG_IGN)  # until the new program handles requests for stacks itself
    os.execve(command.argv[0], command.argv, {**os.environ, **command.env})


def rendezvous_address(first_node: str) -> tuple[str, int]:
    """Parse `--first-node NAME[:PORT]`; return the name, and the port or its default `PORT`."""
    name, colon, port = first_node.rpartition(":")
    if not colon:
        name, port = first_node, ""
    if not re.fullmatch(r"[A-Za-z0-9_\[][A-Za-z0-9_.:\]-]*", name):
        raise ConfigError(
            f"--first-node {quoted(first_node)}: {quoted(name)} is not the name of a machine; write NAME or NAME:PORT"
        )
    if colon and not (re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) <= MAX_PORT):
        reason = f"{quoted(port)} is not a port from 1 to {MAX_PORT}"
        raise ConfigError(f"--first-node {quoted(first_node)}: {reason}; write NAME or NAME:PORT")
    return name, int(port or PORT)


def ranks_per_node(config: RunConfig, nproc: int | None) -> int:
    """Number of ranks per machine: `nproc`, or by default the number that the parallel degrees require."""
    return nproc or max(1, _ranks(config) // config.cluster.nodes)


def check_nodes(loaded: Loaded, nproc: int | None) -> list[Problem]:
    """Return a problem if the ranks of the parallel degrees do not divide over the machines; none with `nproc`."""
    ranks, nodes = _ranks(loaded.config), loaded.config.cluster.nodes
    if nproc is not None or not ranks % nodes:
        return []
    reason = f"{ranks} ranks, from the parallel degrees, do not divide over {nodes} nodes"
    return [Problem("cluster.nodes", reason, loaded.origins["cluster.nodes"], "use --nproc or another dp")]


def check_elastic(config: RunConfig, min_nodes: int) -> list[Problem]:
    """Return the problems of a run that may shrink to `min_nodes` machines; empty if `min_nodes` is 0."""
    nodes, dp = config.cluster.nodes, config.parallel.dp
    if not min_nodes:
        return []
    if min_nodes >= nodes:
        reason = f"{nodes} machines, but with --min-nodes={min_nodes} no machine may be lost"
        return [Problem("cluster.nodes", reason, hint=f"use cluster.nodes={min_nodes + 1} or more, or no --min-nodes")]
    if dp:
        reason = f"{dp}, but with --min-nodes the number of replicas depends on the available machines"
        return [Problem("parallel.dp", reason, hint="use parallel.dp=0")]
    return []


def fewer_nodes(loaded: Loaded, nproc: int, min_nodes: int) -> list[str]:
    """Warn of the largest number of machines with which an elastic run cannot continue; empty if every number works.

    The rendezvous takes all machines that are left, and ranks with an invalid configuration end the run.

    Args:
        loaded: Configuration, which is valid on all machines.
        nproc: Ranks per machine.
        min_nodes: Smallest number of machines; 0 for all machines.
    """
    if not min_nodes:
        return []
    loaded = replace(loaded, config=with_commit(loaded.config))
    most = loaded.config.cluster.nodes
    for nodes in range(most - 1, min_nodes - 1, -1):
        try:
            resolve_config(loaded, nproc * nodes)
        except ConfigError as error:
            why = "; ".join(f"{problem.key}: {problem.reason}" for problem in error.problems)
            code = error.exit_code
            return [f"warning: with {nodes} of the {most} machines, the run would end with exit code {code}: {why}"]
    return []


def render(
    loaded: Loaded,
    path: Path,
    overrides: Sequence[str],
    nproc: int | None,
    environ: Mapping[str, str],
    *,
    first_node: str,
    min_nodes: int = 0,
) -> Command:
    """Build the command that trains on this machine, with the problems that prevent the start.

    Args:
        loaded: Loaded configuration of `path` and `overrides`.
        path: Configuration file.
        overrides: Values that win over the file's.
        nproc: Ranks per machine; None for the number that the parallel degrees require.
        environ: Environment variables of this process.
        first_node: With several machines, NAME[:PORT] of the rendezvous; empty for one machine.
        min_nodes: Smallest number of machines with which the run continues after losses; 0 for all machines.
    """
    config, nodes = loaded.config, loaded.config.cluster.nodes
    neuron = is_neuron(loaded.config)
    meeting = first_node or FIRST_NODE
    name, port = rendezvous_address(meeting)
    uneven = check_nodes(loaded, nproc)
    problems = check_elastic(config, min_nodes) + uneven
    nproc = ranks_per_node(config, nproc)
    plan: Resolved | None = None
    try:
        plan = resolve_config(loaded, None if uneven else nproc * nodes)
        config = plan.config
    except ConfigError as error:
        problems += error.problems
    if config.model.hf != loaded.config.model.hf:
        overrides = [*overrides, f"{KEY}={config.model.hf}"]  # one request to the Hub, and one commit for all ranks
    about: list[str] = []
    variables: list[Variable] = []
    if neuron:
        wanted = needs(config, environ, nproc)
        variables += wanted.variables
        about += wanted.about
        problems += [replace(p, origin=p.origin or loaded.origins.get(p.key, "")) for p in wanted.problems]
    variables += debug_variables(config, environ, neuron=neuron)
    if config.metrics.profile_steps and config.backend.name in {"cpu", "xla"}:
        variables += with_shell_values([QUIET_PROFILER], environ)
    if config.backend.deterministic:
        variables += with_shell_values([CUBLAS_WORKSPACE], environ)
    debugging = {variable.name for variable in variables}
    variables += [variable for variable in gpu_variables(config, environ) if variable.name not in debugging]
    given = {**environ, **{variable.name: variable.value for variable in variables}}
    variables += thread_variables(config, given, nproc, neuron=neuron)
    options: tuple[str, ...] = ("--standalone", "--local-addr=127.0.0.1")
    if nodes > 1:
        about.append(f"on each of the {nodes} nodes; {meeting} is the name of one of them")
        about += fewer_nodes(loaded, nproc, 0 if problems else min_nodes)
        where = f"--rdzv-endpoint={name}:{port}"
        counts = f"{min_nodes}:{nodes}" if min_nodes else f"{nodes}"
        options = (f"--nnodes={counts}", "--rdzv-backend=c10d", where, f"--rdzv-id={config.run.name}")
    argv = [sys.executable]
    # One rank needs an agent, whose imports take seconds, only to be restarted.
    if nproc * nodes > 1 or config.recovery.max_restarts > 0:
        logs, of_agent = agent_settings(config, environ)
        variables += of_agent
        argv += [*AGENT, *options, *logs]
        argv += [f"--nproc-per-node={nproc}", f"--max-restarts={config.recovery.max_restarts}"]
    argv += ["-m", "nxtrain", "train", str(path), *overrides]
    if nodes > 1 and not first_node:
        reason = f"nodes={nodes}, but this is one machine"
        hint = "use cluster.nodes=1, or start it on each node with --first-node NAME, the name of one of them"
        problems.append(Problem("cluster.nodes", reason, loaded.origins["cluster.nodes"], hint))
    return Command(tuple(argv), tuple(variables), tuple(about), plan, tuple(problems))


def _ranks(config: RunConfig) -> int:
    return config.parallel.ranks_per_replica * max(config.parallel.dp, 1)
