"""Turns of `nxtrain bench data` hold the same documents for both sides; the wait for data falls with the workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nxtrain.data.arrow.lanes import CorpusLanes
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.stream_loader import Lane, LaneOrder, Place
from nxtrain.data.tokenization import load_tokenizer
from nxtrain.tools.bench import data_turns
from nxtrain.tools.bench.data_turns import TextTime, TimedTokenizer, packing_turns, take_text_turns
from nxtrain.tools.bench.data_wait import MOST_WAITING, open_batches, share_waiting
from tests.support.corpora import documents, prepare, write_corpus, write_tokenizer

ROW_S = 0.02
"""Time in which a lane makes a row, without work for the machine."""


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_the_bare_tokenizer_gets_the_documents_of_the_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: Literal["concat", "best_fit"]
) -> None:
    monkeypatch.setattr(data_turns, "WINDOW_ROWS", 5)
    monkeypatch.setattr("nxtrain.data.arrow.streams.WINDOW_ROWS", 5)
    prepare(write_corpus(tmp_path / "src", "a.jsonl", documents(60)), out=tmp_path / "o.arrow")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t", 300), 300)
    identity = PreparedCorpus(tmp_path / "o.arrow").identity
    options = (tokenizer.path, tokenizer.end, 300, 0.0)
    source = CorpusLanes((tmp_path / "o.arrow",), (identity,), None, *options, packing=packing, seq_len=24)
    made: list[TimedTokenizer] = []

    class Seen(TimedTokenizer):
        def __init__(self, tokenizer: Tokenizer) -> None:
            super().__init__(tokenizer)
            made.append(self)

    turns = packing_turns(source, 3, lambda name: None)
    monkeypatch.setattr(data_turns, "TimedTokenizer", Seen)
    found = take_text_turns({"ours": turns}, 2)
    sides, bare = made[::2], made[1::2]
    assert [one.texts for one in sides] == [one.texts for one in bare] == [one.texts for one in sides[:3]] * 3
    once = sum(ids.size + 1 for one in sides[:3] for ids in tokenizer.encode(one.texts))
    assert found["tokens"]["ours"] == once
    assert 0 < found["inside"]["ours"] < 1 and len(found["rows"][0]["rounds"]) == 2


@pytest.mark.parametrize("slow", [1.0, 9.0])
def test_ratios_are_of_both_times_of_a_turn(slow: float) -> None:
    """The machine is up to nine times as slow from turn to turn, and the second of each turn takes 0.8 of its time."""
    orders: list[bool] = []

    def turn(speed: float, bare_first: bool) -> TextTime:
        orders.append(bare_first)
        side_s, bare_s = (0.8, 1.0) if bare_first else (1.0, 0.8)
        return TextTime(2 * speed * side_s, 1.5 * speed * side_s, speed * bare_s, tokens=100)

    turns = [partial(turn, 1.0), partial(turn, slow)]
    found = take_text_turns({"ours": turns}, 2)
    assert orders == [False, True, True, False, False, True]  # each turn in both orders, one round after the other
    assert found["inside"] == {"ours": 0.75}
    assert found["ratios"]["ours"] == pytest.approx((0.4 + 0.625) / 2)


class SlowLane:
    """A lane whose rows take time, and no work."""

    def __init__(self, place: Place) -> None:
        self._row = place[0]

    @property
    def place(self) -> Place:
        """Place of the next row."""
        return self._row, 0

    def row(self) -> NDArray[np.int32]:
        """Next row."""
        time.sleep(ROW_S)
        self._row += 1
        return np.zeros(5, np.int32)


@dataclass(frozen=True)
class SlowLanes:
    """Source of such lanes, as if each worker had a core of its own."""

    def opened(self, mark: Callable[[str], None] | None = None) -> Callable[[LaneOrder, int, Place], Lane]:
        """Function that opens a lane."""
        return lambda order, lane, place: SlowLane(place)


@pytest.mark.alone
@pytest.mark.slow
def test_the_rate_without_a_wait_grows_with_the_workers() -> None:
    """A row of the device takes a quarter of a worker's: eight keep it busy, and each halving below four waits."""
    shares = {}
    for workers in (1, 2, 8):
        with open_batches(SlowLanes(), LaneOrder(8, 0, True), workers, rows=8) as batches:
            shares[workers] = share_waiting(batches, ROW_S / 4, steps=20)
    assert shares[8] < MOST_WAITING
    assert shares[2] == pytest.approx(1 / 2, abs=0.1)
    assert shares[1] == pytest.approx(3 / 4, abs=0.1)
