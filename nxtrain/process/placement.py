"""Place of this process in its job: the only code that reads the variables of torchrun's agent and of Slurm."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nxtrain.errors import BackendError

SHOWN_NODES = 8
"""Most nodes that a message names."""


@dataclass(frozen=True)
class Placement:
    """Place of this process among the ranks and the starts of a job; a process started alone is rank 0 of 1.

    Args:
        rank: Rank of this process.
        world: Number of ranks.
        local_rank: Rank among those of this machine.
        local_world: Number of ranks on this machine.
        restarts: Restarts of the ranks by the agent of this machine.
        is_requeued: True if Slurm started the job before.
        job: Job id of Slurm or run id of the agent, which distinguishes two identical commands; empty if there is none.
        speaks_for_node: True if errors that all ranks of the node share are this rank's to print.
        is_launched: True if a launcher set the rank.
        has_agent: True if an agent of torch started this process.
        uses_agents_store: True if the agents keep the store of the rendezvous.
        is_only_agent: True if one agent started all ranks.
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
        """Read the variables of torchrun's agent and of Slurm.

        Raises:
            BackendError: A variable that must be a number is none.
        """

        def number(name: str, default: int) -> int:
            try:
                return int(environ.get(name, default))
            except ValueError:
                raise BackendError(
                    f"{name}={environ[name]} is no number; torchrun and nxtrain launch set it, and a command that is "
                    "started alone needs none: unset it"
                ) from None

        return Placement(
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

    def on_nodes(self, ranks: Iterable[int]) -> str:
        """Words about the nodes of some ranks, counted from 0 as torchrun counts them; empty if the run has one."""
        if self.world <= self.local_world:
            return ""
        nodes = sorted({rank // self.local_world for rank in ranks})
        shown = ", ".join(map(str, nodes[:SHOWN_NODES])) + (" and others" if len(nodes) > SHOWN_NODES else "")
        return f" on node{'s' * (len(nodes) > 1)} {shown}"

    @property
    def is_restart(self) -> bool:
        """True if the same command was started before, by the agent or by Slurm."""
        return self.restarts > 0 or self.is_requeued

    @property
    def is_alone(self) -> bool:
        """True if the run has no other process."""
        return self.world == 1

    @property
    def is_leader(self) -> bool:
        """True on rank 0."""
        return self.rank == 0
