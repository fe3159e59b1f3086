"""Placement of this process in its job, read from the environment variables of torchrun's agent and of Slurm.

No other code reads these variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nxtrain.common.errors import BackendError
from nxtrain.common.text import listed

SHOWN_CHARS = 40
"""Maximum number of characters of a variable that a message shows."""
MAX_PORT = 65535


@dataclass(frozen=True)
class Placement:
    """Rank, world size, machine and restart count of this process in a job. A process started alone is rank 0 of 1.

    Args:
        rank: Global rank.
        world: Number of ranks of the job.
        local_rank: Rank inside this machine.
        local_world: Number of ranks on this machine.
        restarts: Number of restarts of the ranks by the agent of this machine.
        is_requeued: True if Slurm has started this job before.
        job: Job id of Slurm or run id of the agent, which distinguishes two identical commands; empty without either.
        speaks_for_node: True if this rank prints the errors that all ranks of the node share.
        is_launched: True if a launcher set the variable RANK.
        has_agent: True if an agent of torchrun started this process.
        uses_agents_store: True if the rendezvous store belongs to the agent.
        is_only_agent: True if a single agent started all ranks.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    restarts: int = 0
    is_requeued: bool = False
    job: str = ""
    speaks_for_node: bool = True
    is_launched: bool = False
    has_agent: bool = False
    uses_agents_store: bool = False
    is_only_agent: bool = False

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> Placement:
        """Read the environment variables of torchrun's agent and of Slurm.

        Raises:
            BackendError: The variables contradict each other, or have no meaning.
        """

        def number(name: str, default: int) -> int:
            try:
                return int(environ.get(name, default))
            except ValueError:
                raise _impossible(f"{name}={environ[name][:SHOWN_CHARS]} is not a number") from None

        placement = Placement(
            rank=number("RANK", 0),
            world=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_world=number("LOCAL_WORLD_SIZE", 1),
            restarts=number("TORCHELASTIC_RESTART_COUNT", 0),
            is_requeued=number("SLURM_RESTART_COUNT", 0) > 0,
            job=environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID", ""),
            speaks_for_node=number("LOCAL_RANK", number("RANK", 0)) == 0,
            is_launched="RANK" in environ,
            has_agent="TORCHELASTIC_RUN_ID" in environ,
            uses_agents_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            is_only_agent=environ.get("GROUP_WORLD_SIZE") == "1" and "TORCHELASTIC_RESTART_COUNT" in environ,
        )
        reason = _contradiction(placement, environ) or _unusable(environ)
        if reason:
            raise _impossible(reason)
        return placement

    def on_nodes(self, ranks: Iterable[int]) -> str:
        """Text that names the nodes of some ranks, such as ` on nodes 0, 2`; empty if the run has one node.

        Nodes are counted from 0 as torchrun counts them.
        """
        if self.world <= self.local_world:
            return ""
        nodes = sorted({rank // self.local_world for rank in ranks})
        return f" on node{'s' * (len(nodes) > 1)} {listed(nodes)}"

    @property
    def is_restart(self) -> bool:
        """True if the agent or Slurm has started the same command before."""
        return self.restarts > 0 or self.is_requeued

    @property
    def is_alone(self) -> bool:
        """True if the job has only this process."""
        return self.world == 1

    @property
    def is_leader(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


def _contradiction(placement: Placement, environ: Mapping[str, str]) -> str:
    """Description of a contradiction between the variables of the rank and the world; empty if there is none."""
    rank, world = placement.rank, placement.world
    local_rank, local_world = placement.local_rank, placement.local_world
    rank_of_world = f"RANK={rank} of WORLD_SIZE={world}"
    if world < 1 or local_world < 1:
        return f"WORLD_SIZE={world} and LOCAL_WORLD_SIZE={local_world}: a world has at least one rank"
    if not 0 <= rank < world:
        unset = "" if "WORLD_SIZE" in environ else ", which is not set and counts as 1"
        return f"{rank_of_world}{unset}: ranks count from 0 to WORLD_SIZE - 1"
    if world > 1 and "RANK" not in environ:
        return f"WORLD_SIZE={world} without RANK: each rank needs a number of its own"
    if "WORLD_SIZE" in environ and local_world > world:
        return f"LOCAL_WORLD_SIZE={local_world} of WORLD_SIZE={world}: a machine has a part of the ranks, or all"
    is_local_world_known = "LOCAL_WORLD_SIZE" in environ or world == 1
    if local_rank < 0 or (is_local_world_known and local_rank >= local_world):
        return f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_world}: local ranks count from 0"
    if local_rank > rank:
        return f"LOCAL_RANK={local_rank} and {rank_of_world}: a local rank is not above the rank"
    return ""


def _unusable(environ: Mapping[str, str]) -> str:
    """Description of an invalid variable that other libraries would ignore silently; empty if all are valid."""
    port = environ.get("MASTER_PORT", "1")
    if not (port.isascii() and port.isdigit() and len(port) <= len(str(MAX_PORT)) and 1 <= int(port) <= MAX_PORT):
        return f"MASTER_PORT={port[:SHOWN_CHARS]} is not a port, which is a number from 1 to {MAX_PORT}"
    if not environ.get("MASTER_ADDR", "localhost").strip():
        return "MASTER_ADDR is empty, and names the machine of rank 0"
    threads = environ.get("OMP_NUM_THREADS", "")
    # OpenMP takes a list with a number for each level of nested parallelism, and ignores the variable if empty.
    if threads.strip() and not re.fullmatch(r"\s*0*[1-9]\d{0,5}\s*(,\s*0*[1-9]\d{0,5}\s*)*", threads):
        return f"OMP_NUM_THREADS={threads[:SHOWN_CHARS]} is not a number of threads, which is 1 or more"
    return ""


def _impossible(reason: str) -> BackendError:
    return BackendError(
        f"{reason}; torchrun and nxtrain launch set these variables, and a command that is started alone needs "
        "none: unset it"
    )
