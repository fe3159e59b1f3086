"""Errors for ranks that do not fit together."""

from __future__ import annotations

import pytest

from nxtrain.backends.xla.environment import trace_environment
from nxtrain.backends.xla.world import misfit
from nxtrain.common.distributed.host_group import disagreement, in_world
from nxtrain.common.mesh import spans
from nxtrain.common.process.placement import Placement

PLACE = Placement(rank=5, world=32, local_rank=5, local_world=32)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3, 4, 9, 10, 11], "1, 3-4, 9-11")]
)
def test_numbers_in_a_row_are_a_span(ranks: list[int], text: str) -> None:
    assert spans(ranks) == text


def test_ranks_that_agree_are_silent() -> None:
    assert disagreement(dict.fromkeys(range(3), ("step 1", "aa")), 3) == ""


def test_ranks_that_differ_are_named_with_the_first_digits() -> None:
    result = [("step 1", "a" * 32), ("step 1", "b" * 32), ("step 1", "a" * 32), ("step 2", "a" * 32), ("step 1", "")]
    first, *graphs, causes, way_out = disagreement(dict(enumerate(result)), 5).splitlines()
    assert first.startswith("ranks 1, 3-4 of 5 would run another graph than rank 0, ")
    assert graphs == [
        "    ranks 0, 2: step 1, aaaaaaaaaaaa",
        "    rank 1: step 1, bbbbbbbbbbbb",
        "    rank 3: step 2, aaaaaaaaaaaa",
        "    rank 4: step 1, no graph",
    ]
    assert "Python number that depends on the rank" in causes
    assert way_out.startswith("nxtrain graphs CONFIG --world 5 --rank 0 --rank 1 --hlo DIR ")


def test_ranks_of_a_stage_are_compared_with_its_first() -> None:
    result = {rank: ("step 1", "b" * 32 if rank == 6 else "a" * 32) for rank in range(4, 8)}
    first, same, other, _, way_out = disagreement(result, 8).splitlines()
    assert first.startswith("rank 6 of the stage of ranks 4-7 would run another graph than rank 4, ")
    assert (same, other) == ("    ranks 4-5, 7: step 1, aaaaaaaaaaaa", "    rank 6: step 1, bbbbbbbbbbbb")
    assert way_out.startswith("nxtrain graphs CONFIG --world 8 --rank 4 --rank 6 --hlo DIR ")


def test_torchs_numbers_of_a_groups_ranks_become_those_of_the_world() -> None:
    said = "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 1500 ms"
    assert in_world(said, [4, 6, 9]) == "[Rank 4]: Ranks 6, 9 failed to pass monitoredBarrier in 1500 ms"
    said = "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
    assert in_world(said, [4, 6]) == said.replace("k 1", "k 6").replace("k 0", "k 4")
    assert in_world(said, [0, 1]) == said


def test_of_many_graphs_a_few_are_listed() -> None:
    lines = disagreement({rank: ("step 1", f"{rank:032x}") for rank in range(64)}, 64).splitlines()
    assert lines[0].startswith("ranks 1-63 of 64 ")
    assert lines[12:14] == ["    rank 11: step 1, " + "0" * 12, "    and 52 more"]


@pytest.mark.parametrize(
    ("device", "launched", "placement", "way_out"),
    [
        ("CPU", True, PLACE, "Use backend.name=cpu for several ranks"),
        ("NEURON", False, PLACE, "Use torchrun or nxtrain launch"),
        ("NEURON", True, Placement(1, 2, 0, 1), "Start at least two ranks per node"),
        (
            "NEURON",
            True,
            PLACE,
            "unset XLA_USE_SPMD, NEURONCORE_NUM_DEVICES and all variables that begin with NEURON_PJRT_",
        ),
    ],
)
def test_a_world_of_one_where_torchrun_started_more_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, device: str, launched: bool, placement: Placement, way_out: str
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    text = misfit(placement, 0, 1, device)
    assert (
        f"torchrun started rank {placement.rank} of {placement.world}, but PyTorch/XLA on {device} is rank 0 of 1"
        in text
    )
    assert way_out in text


def test_a_process_that_traces_has_no_other_ranks() -> None:
    output = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "any"}
    assert trace_environment({**output, "HOME": "/root"}) == {
        "HOME": "/root",
        "LOCAL_WORLD_SIZE": "1",
        "NXD_LOG_LEVEL": "warning",
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "1",
    }
