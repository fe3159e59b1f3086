"""Ranks that compare what they are about to run, over gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.host_group import HostGroup
from nxtrain.common.errors import HangError, LostPeerError, NxtrainError
from nxtrain.common.mesh import Mesh
from tests.support.ranks import RankPool

PATIENCE_S = 3.0


def compared(
    backend: Backend, seen: Sequence[tuple[str, str]], absent: int | None, layout: Mesh | None = None
) -> tuple[str, str, float]:
    """Compare what each rank sees; class, message and seconds of what came of it. An absent rank sleeps instead."""
    hosts = HostGroup(PATIENCE_S)
    if layout is not None:
        hosts.compare_among(replace(layout, rank=backend.rank).stage)
    hosts.barrier()
    began = time.monotonic()
    if backend.rank == absent:
        time.sleep(2 * PATIENCE_S)
        return "", "", 0.0
    try:
        hosts.compare(*seen[backend.rank])
    except NxtrainError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def absent_from_a_node(backend: Backend, absent: int) -> str:
    """Message of a barrier to which one rank does not come, where each rank has a node of its own."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    hosts = HostGroup(PATIENCE_S / 3)
    if backend.rank == absent:
        time.sleep(PATIENCE_S / 2)
        return ""
    try:
        hosts.barrier("the checkpoint of step 3")
    except HangError as error:
        return str(error)
    raise AssertionError("passed without it")


@pytest.mark.alone
def test_a_rank_that_does_not_come_is_named_with_its_node(ranks: RankPool) -> None:
    result = ranks.run(3, absent_from_a_node, 2)
    assert result[0].startswith("some ranks are missing at the checkpoint of step 3, where the others wait for ")
    assert "Ranks 2 failed to pass monitoredBarrier in 1000 ms on node 2. A missing rank crashed" in result[0]


def test_equal_graphs_pass(ranks: RankPool) -> None:
    result = ranks.run(3, compared, [("step 1", "aa")] * 3, None)
    assert [kind for kind, _, _ in result] == ["", "", ""]


@pytest.mark.parametrize("other", [("step 1", "bb"), ("step 2", "aa"), ("step 1", "")], ids=["graph", "work", "none"])
def test_a_different_rank_ends_all_and_rank_0_says_which(ranks: RankPool, other: tuple[str, str]) -> None:
    result = ranks.run(3, compared, [("step 1", "aa"), ("step 1", "aa"), other], None)
    assert [kind for kind, _, _ in result] == ["BackendError"] * 3
    assert result[0][1].startswith("rank 2 of 3 would run another graph than rank 0")
    assert all(text.endswith("; see rank 0") for _, text, _ in result[1:])


@pytest.mark.alone
def test_a_rank_that_does_not_come_ends_the_others_in_time(ranks: RankPool) -> None:
    result = ranks.run(3, compared, [("step 7", "aa")] * 3, 1)
    assert [kind for kind, _, _ in result] == ["HangError", "", "HangError"]
    assert result[0][1].startswith(
        "some ranks are missing at the comparison of graphs in step 7, where the others wait"
    )
    assert "Ranks 1 failed to pass" in result[0][1]
    assert all(PATIENCE_S * 0.9 < result[rank][2] < PATIENCE_S * 1.9 for rank in (0, 2))


def left_alone(backend: Backend, leaves: int) -> tuple[str, str, int | None, float]:
    """Compare what ranks see after one has left; class, message, blamed rank and seconds of what came of it."""
    hosts = HostGroup(20 * PATIENCE_S)
    hosts.barrier()
    began = time.monotonic()
    if backend.rank == leaves:
        dist.destroy_process_group(hosts.group)
        return "", "", None, 0.0
    try:
        hosts.compare("step 7", "aa")
    except LostPeerError as error:
        return type(error).__name__, str(error), error.peer, time.monotonic() - began
    raise AssertionError("compared without it")


@pytest.mark.alone
def test_a_rank_that_is_gone_is_told_at_once_and_from_one_that_is_late(ranks: RankPool) -> None:
    result = ranks.run(2, left_alone, 1)
    kind, message, peer, seconds = result[0]
    assert (kind, peer) == ("LostPeerError", 1)
    assert message.startswith("rank 1 is gone, which the others wait for at the comparison of graphs in step 7: ")
    assert seconds < PATIENCE_S
    kind, message, peer, _ = ranks.run(2, left_alone, 0)[1]
    assert (kind, peer) == ("LostPeerError", None)
    assert message.startswith("another rank of this rank's process group is gone, which the others wait for at ")


STAGES = Mesh(4, 0, pp_size=2, tp_size=2, order=(1, 2, 0, 3))


def test_stages_run_graphs_of_their_own(ranks: RankPool) -> None:
    seen = [("step 1", "bb"), ("step 1", "aa"), ("step 1", "aa"), ("step 1", "bb")]
    assert [kind for kind, _, _ in ranks.run(4, compared, seen, None, STAGES)] == [""] * 4


def test_a_rank_that_differs_ends_its_stage_alone(ranks: RankPool) -> None:
    seen = [("step 1", "bb"), ("step 1", "aa"), ("step 1", "aa"), ("step 1", "cc")]
    result = ranks.run(4, compared, seen, None, STAGES)
    assert [kind for kind, _, _ in result] == ["BackendError", "", "", "BackendError"]
    assert result[0][1].startswith("rank 3 of the stage of ranks 0, 3 would run another graph than rank 0, ")
    assert result[3][1].endswith("; see rank 0")


def test_a_rank_that_does_not_come_is_named_to_its_stage_by_its_number_in_the_world(ranks: RankPool) -> None:
    result = ranks.run(4, compared, [("step 7", "aa")] * 4, 2, STAGES)
    assert [kind for kind, _, _ in result] == ["", "HangError", "", ""]
    assert "Ranks 2 failed to pass" in result[1][1]
