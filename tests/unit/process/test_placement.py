"""Place of a process in its job, by the variables of torchrun's agent and of Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nxtrain
from nxtrain.errors import BackendError
from nxtrain.process.placement import Placement

AGENT = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


def test_a_process_started_alone_is_rank_0_of_1() -> None:
    place = Placement.read({})
    assert place == Placement(rank=0, world=1, local_rank=0, local_world=1)
    assert place.is_alone and place.is_leader and not place.is_launched and not place.is_restart


def test_a_rank_of_an_agent() -> None:
    place = Placement.read(AGENT)
    assert place == Placement(rank=9, world=16, local_rank=1, local_world=8, speaks_for_node=False, is_launched=True)
    assert not place.is_alone and not place.is_leader


@pytest.mark.parametrize(
    ("variables", "is_restart", "job"),
    [
        ({}, False, ""),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "a"}, False, "a"),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, True, ""),
        ({"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "12", "TORCHELASTIC_RUN_ID": "none"}, True, "12"),
    ],
)
def test_restarts_of_the_agent_and_of_slurm(variables: dict[str, str], is_restart: bool, job: str) -> None:
    place = Placement.read(variables)
    assert (place.is_restart, place.job) == (is_restart, job)
    assert place.has_agent == ("TORCHELASTIC_RUN_ID" in variables)


@pytest.mark.parametrize(("agents", "alone"), [("1", True), ("2", False)])
def test_one_agent_numbers_the_starts_of_all_ranks(agents: str, alone: bool) -> None:
    assert Placement.read({"GROUP_WORLD_SIZE": agents, "TORCHELASTIC_RESTART_COUNT": "0"}).is_only_agent == alone
    assert not Placement.read({"GROUP_WORLD_SIZE": agents}).is_only_agent


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(BackendError, match=r"WORLD_SIZE=four is no number.*unset it"):
        Placement.read({"WORLD_SIZE": "four"})


def test_no_other_code_reads_these_variables() -> None:
    """Except the launcher and doctor, which set them for ranks of their own, and the tracer, which removes them."""
    names = re.compile(r"[\"'](RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|TORCHELASTIC_[A-Z_]+|SLURM_RESTART_COUNT)[\"']")
    root = Path(nxtrain.__file__).parent
    owners = {"process/placement.py", "backends/xla/environment.py", "bench/turns.py"}
    owners |= {"doctor/collectives.py", "cli/doctor.py"}  # `--rank` and `--world` have these names as defaults
    readers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.parent.name != "launch" and names.search(path.read_text(encoding="utf-8"))
    }
    assert readers == owners
