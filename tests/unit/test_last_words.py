"""A rank that reads the others' errors writes its own at once."""

from __future__ import annotations

import time

from torch.distributed import TCPStore

from nxtrain.distributed.failures import ANSWER_S, FirstFailure


def test_words_are_left_at_once_after_none_were_found() -> None:
    words = FirstFailure(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    begin = time.monotonic()
    assert words.await_first(0.1) == ""
    assert words.publish("rank 1 failed") == "rank 1 failed"
    assert time.monotonic() - begin < ANSWER_S / 2
    assert words.await_first(0.1) == words.publish("rank 2 failed") == "rank 1 failed"
