"""Classification of connection errors, and the first failure that the ranks share."""

from __future__ import annotations

import time

import pytest
from torch.distributed import TCPStore

from nxtrain.common.distributed.failures import ANSWER_S, FirstFailure, Peers, loss, translate_peer_errors
from nxtrain.common.errors import HangError, LostPeerError
from nxtrain.common.process.deadlines import describe_limit

PEER = Peers("pipeline stage 1 of 2 (rank 7)", 7, describe_limit(30.0, first_use=False))

GONE = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:38808: Connection reset by peer",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1024",
    "writev [127.0.0.1]:1024: Broken pipe",
    "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 3000 ms",
    "[Rank 2]: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
]
LATE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation"
)


@pytest.mark.parametrize("line", GONE)
def test_a_connection_that_ended_is_a_peer_that_is_gone(line: str) -> None:
    with pytest.raises(LostPeerError) as lost, translate_peer_errors(PEER):
        raise RuntimeError(f"{line}\nand more")
    assert str(lost.value).startswith(f"{PEER.name} is gone: {line}. Its process crashed")
    assert lost.value.peer == 7


def test_a_connection_that_is_silent_is_a_peer_that_hangs() -> None:
    with pytest.raises(HangError) as lost, translate_peer_errors(PEER):
        raise RuntimeError(LATE)
    assert str(lost.value).startswith(
        f"{PEER.name} did not come within recovery.hang_timeout_s=30 seconds: {LATE}. It hangs"
    )
    assert lost.value.peer == 7


def test_a_failure_of_another_kind_is_no_loss() -> None:
    """Such as one of this rank's own, of which no other is to be blamed."""
    error = RuntimeError("No backend type associated with device type meta")
    with pytest.raises(RuntimeError) as raised, translate_peer_errors(PEER):
        raise error
    assert raised.value is error
    assert loss(error) is None


def test_a_loss_is_found_behind_what_it_caused() -> None:
    outer = ValueError("a step failed")
    outer.__cause__ = RuntimeError(GONE[0])
    result = loss(outer)
    assert isinstance(result, LostPeerError)
    assert result.peer is None
    assert str(result).startswith("another rank of this rank's process group is gone: ")


def test_words_are_left_at_once_after_none_were_found() -> None:
    words = FirstFailure(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    begin = time.monotonic()
    assert words.await_first(0.1) == ""
    assert words.publish("rank 1 failed") == "rank 1 failed"
    assert time.monotonic() - begin < ANSWER_S / 2
    assert words.await_first(0.1) == words.publish("rank 2 failed") == "rank 1 failed"
