"""Rendezvous of agents, and its messages."""

from __future__ import annotations

import socket
import time

import pytest

from nxtrain.launch import agent_rendezvous
from nxtrain.launch.agent_rendezvous import AgentRendezvous, reasons


def test_a_machine_that_is_back_ends_the_wait_and_one_that_is_not_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = AgentRendezvous("127.0.0.1", server.getsockname()[1])
        assert place.await_store(time.monotonic() + 5.0)
    begin = time.monotonic()
    assert not place.await_store(begin + 0.1)
    assert time.monotonic() - begin < 3.0


def test_nobody_is_waited_for_without_other_machines() -> None:
    assert not AgentRendezvous().await_store(time.monotonic() + 60.0)


def test_others_that_are_waited_for_are_told_only_if_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place = AgentRendezvous("node0", 29500, patience_s=60.0)
    with place.announce_wait():
        pass
    monkeypatch.setattr(agent_rendezvous, "LATE_S", 0.01)
    with place.announce_wait():
        time.sleep(0.2)
    assert (
        capfd.readouterr().err == "waiting at node0:29500 for the agents of the other machines, for up to 60 seconds\n"
    )


def test_an_error_has_the_first_line_of_each_that_it_comes_from() -> None:
    try:
        try:
            raise OSError("no route\n at frame 1")
        except OSError as error:
            raise RuntimeError("the store is lost") from error
    except RuntimeError as error:
        assert reasons(error) == "the store is lost; no route"
