"""Place of a process in its job, by the variables of torchrun's agent and of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import BackendError
from nxtrain.common.process.placement import Placement
from tests.support import commands

AGENT = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


def test_a_process_started_alone_is_rank_0_of_1() -> None:
    placement = Placement.read({})
    assert placement == Placement(rank=0, world=1, local_rank=0, local_world=1)
    assert placement.is_alone and placement.is_leader and not placement.is_launched and not placement.is_restart


def test_a_rank_of_an_agent() -> None:
    placement = Placement.read(AGENT)
    assert placement == Placement(
        rank=9, world=16, local_rank=1, local_world=8, speaks_for_node=False, is_launched=True
    )
    assert not placement.is_alone and not placement.is_leader


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
    placement = Placement.read(variables)
    assert (placement.is_restart, placement.job) == (is_restart, job)
    assert placement.has_agent == ("TORCHELASTIC_RUN_ID" in variables)


@pytest.mark.parametrize(("agents", "alone"), [("1", True), ("2", False)])
def test_one_agent_numbers_the_starts_of_all_ranks(agents: str, alone: bool) -> None:
    assert Placement.read({"GROUP_WORLD_SIZE": agents, "TORCHELASTIC_RESTART_COUNT": "0"}).is_only_agent == alone
    assert not Placement.read({"GROUP_WORLD_SIZE": agents}).is_only_agent


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(BackendError, match=r"WORLD_SIZE=four is not a number.*unset it"):
        Placement.read({"WORLD_SIZE": "four"})


NUMBERS = st.none() | st.integers(-2, 5)
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def possible(given: dict[str, int]) -> bool:
    """True if some world of 1 to 9 ranks on machines of 1 to 9 local ranks has a rank with these variables."""
    ranks = (
        {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world}
        for world in range(1, 10)
        for rank in range(world)
        for local_world in range(1, world + 1)
        for local_rank in range(min(local_world, rank + 1))
    )
    alone = {"RANK": 0, "WORLD_SIZE": 1}
    # A launcher that sets WORLD_SIZE sets RANK too; without them the process is alone.
    wanted = given if given.get("WORLD_SIZE", 1) > 1 else {**alone, **given}
    if "WORLD_SIZE" not in given:  # a number of local ranks alone describes the machine of a traced world
        wanted.pop("LOCAL_WORLD_SIZE", None)
        if given.get("LOCAL_WORLD_SIZE", 1) < 1 or given.get("LOCAL_RANK", 0) >= given.get("LOCAL_WORLD_SIZE", 1):
            return False
    has_rank = wanted.get("WORLD_SIZE", 1) == 1 or "RANK" in given
    return has_rank and any(all(rank[name] == value for name, value in wanted.items()) for rank in ranks)


@settings(max_examples=600)
@given(st.fixed_dictionaries(dict.fromkeys(RANK_VARIABLES, NUMBERS)))
def test_a_rank_that_no_world_has_is_refused_at_once(drawn: dict[str, int | None]) -> None:
    given_numbers = {name: value for name, value in drawn.items() if value is not None}
    variables = {name: str(value) for name, value in given_numbers.items()}
    if possible(given_numbers):
        placement = Placement.read(variables)
        assert 0 <= placement.rank < placement.world
        return
    with pytest.raises(BackendError, match=r"_SIZE=|RANK=.*unset it"):
        Placement.read(variables)


@pytest.mark.parametrize("variables", [{"RANK": "5", "WORLD_SIZE": "2"}, {"RANK": "1"}, {"RANK": "-1"}])
def test_a_run_of_a_rank_that_no_world_has_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run.toml").touch()
    err = commands.errors_of("train", tmp_path / "run.toml", code=BackendError.exit_code)
    assert "ranks count from 0 to WORLD_SIZE - 1" in err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("MASTER_PORT", value) for value in ("abc", "", "0", "-1", "65536", "1.5", "9" * 5000, "\u0661")),
        *(("MASTER_ADDR", value) for value in ("", " ")),
        *(("OMP_NUM_THREADS", value) for value in ("0", "-1", "abc", "1.5", "4,0", ",", "4,", "9" * 5000)),
        *(("RANK", value) for value in ("", "abc", "1.5", "9" * 5000)),
    ],
)
def test_a_variable_that_libraries_would_ignore_is_refused(name: str, value: str) -> None:
    with pytest.raises(BackendError, match=name) as error:
        Placement.read({name: value})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("threads", ["", " ", "1", " 8 ", "08", "4,2", "4, 2"])
def test_numbers_of_threads_of_openmp_are_allowed(threads: str) -> None:
    assert Placement.read({"OMP_NUM_THREADS": threads, "MASTER_PORT": "29500", "MASTER_ADDR": "::1"}).is_alone
