"""Ranks that cannot meet are told where and why."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from nxtrain.backends.board import Beat, Board
from nxtrain.backends.meeting import meet
from nxtrain.errors import BackendError

SHORT = timedelta(seconds=2)


def at(monkeypatch: pytest.MonkeyPatch, host: str, port: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


def test_ranks_of_different_worlds_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    at(monkeypatch, "127.0.0.1", agent.port)
    meet(0, 2, SHORT)
    meet(1, 2, SHORT)
    with pytest.raises(BackendError, match=r"rank 2 was started with WORLD_SIZE=3, and rank 0 with 2; .*--nnodes"):
        meet(2, 3, SHORT)


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    at(monkeypatch, "127.0.0.1", port)
    with pytest.raises(
        BackendError, match=rf"cannot meet the other ranks at MASTER_ADDR:MASTER_PORT=127.0.0.1:{port}: "
    ):
        meet(1, 2, SHORT)


def test_the_last_to_say_what_it_has_begun_decides() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = [Board(store, rank, 3) for rank in range(3)]
    assert not boards[0].calls()
    boards[2].ask_stop("SIGTERM at rank 2")
    boards[1].ask_stop("SIGTERM at rank 1")
    assert all(board.calls() for board in boards)
    assert boards[0].stop_asked() == "SIGTERM at rank 2"
    for board, begun in zip(boards, [4, 5, 4], strict=True):
        assert board.stop_step() is None
        board.say_begun(begun)
    assert {board.stop_step() for board in boards} == {5}


def test_one_declares_a_hang_and_hears_those_that_live() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = [Board(store, rank, 3) for rank in range(3)]
    assert [board.declare_hang() for board in boards] == [True, False, False]
    assert boards[0].calls()
    assert not boards[0].stop_asked()
    beat = Beat(3, "data", 1.5, spent={"data": 0.25})
    boards[0].answer(beat)
    boards[2].answer(beat)
    assert boards[0].answers() == {0: beat, 2: beat}
    boards[0].judge("rank 1")
    assert boards[2].verdict() == "rank 1"
