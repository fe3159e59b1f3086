"""Ranks that cannot meet are told where and why."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from nxtrain.common.distributed.heartbeats import Beat, HeartbeatStore
from nxtrain.common.distributed.rendezvous import join_rendezvous
from nxtrain.common.errors import BackendError

SHORT = timedelta(seconds=2)


def at(monkeypatch: pytest.MonkeyPatch, host: str, port: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


def in_threads(*ranks: tuple[int, int]) -> dict[int, str]:
    """Let ranks meet, each with its idea of the world; what each is told, empty if it met the others."""
    output: dict[int, str] = {}

    def run(rank: int, world: int) -> None:
        try:
            join_rendezvous(rank, world, SHORT)
            output[rank] = ""
        except BackendError as error:
            output[rank] = str(error)

    threads = [threading.Thread(target=run, args=arguments) for arguments in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(20)
    return output


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    at(monkeypatch, "127.0.0.1", store.port)
    return store


def test_ranks_of_one_world_meet(agent: TCPStore) -> None:
    assert in_threads((1, 3), (2, 3), (0, 3)) == {0: "", 1: "", 2: ""}


def test_ranks_of_different_worlds_are_told_apart_on_all_of_them(agent: TCPStore) -> None:
    begin = time.monotonic()
    output = in_threads((0, 2), (2, 3))
    assert set(output) == {0, 2}
    assert set(output.values()) == {output[0]}
    assert output[0].startswith("rank 2 was started with WORLD_SIZE=3, and rank 0 with 2; ")
    assert "--nnodes" in output[0]
    assert time.monotonic() - begin < SHORT.total_seconds()


def test_ranks_that_do_not_come_are_named(agent: TCPStore) -> None:
    output = in_threads((0, 4), (2, 4))
    assert output[0] == output[2]
    assert output[0].startswith("2 of 4 ranks did not come within recovery.hang_timeout_s=2 seconds: 1, 3. ")


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    at(monkeypatch, "127.0.0.1", port)
    with pytest.raises(
        BackendError, match=rf"cannot meet the other ranks at MASTER_ADDR:MASTER_PORT=127.0.0.1:{port}: "
    ):
        join_rendezvous(1, 2, SHORT)


def test_the_last_to_say_what_it_has_begun_decides() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = [HeartbeatStore(store, rank, 3) for rank in range(3)]
    assert not boards[0].calls()
    boards[2].ask_stop("SIGTERM at rank 2")
    boards[1].ask_stop("SIGTERM at rank 1")
    assert all(board.calls() for board in boards)
    assert boards[0].stop_asked() == "SIGTERM at rank 2"
    for board, begun in zip(boards, [4, 5, 4], strict=True):
        assert board.stop_step() is None
        board.publish_begun(begun)
    assert {board.stop_step() for board in boards} == {5}


def test_who_says_it_again_over_a_new_connection_counts_once() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (HeartbeatStore(store, rank, 2) for rank in range(2))
    first.publish_begun(4)
    first.again().publish_begun(4)
    assert first.stop_step() is None
    second.publish_begun(6)
    assert first.stop_step() == 6


def test_one_declares_a_hang_and_hears_those_that_live() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = [HeartbeatStore(store, rank, 3) for rank in range(3)]
    assert [board.declare_hang() for board in boards] == [True, False, False]
    assert boards[0].calls()
    assert not boards[0].stop_asked()
    beat = Beat(3, "data", 1.5, spent={"data": 0.25})
    boards[0].answer(beat)
    boards[2].answer(beat)
    assert boards[0].answers() == {0: beat, 2: beat}
    boards[0].judge("rank 1")
    assert boards[2].verdict() == "rank 1"
