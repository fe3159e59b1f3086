"""Turns of `nxtrain bench data` hold the same documents for both sides; the wait for data falls with the workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.streams import CorpusLanes
from nxtrain.data.stream_loader import Lane, LaneOrder, LanePosition
from nxtrain.data.tokenization import load_tokenizer
from nxtrain.tools.bench import data_turns
from nxtrain.tools.bench.data_turns import TextTime, WatchedTokenizer, packing_turns, speed_ratio, take_text_turns
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
    bare, sided = list[str](), list[str]()
    encode_bare, encode = WatchedTokenizer._encode_bare, WatchedTokenizer.encode_batch_fast

    def note_bare(self: WatchedTokenizer, texts: list[str]) -> float:
        bare.extend(texts)
        return encode_bare(self, texts)

    def note_side(self: WatchedTokenizer, texts: list[str], **options: Any) -> Any:
        sided.extend(texts)
        return encode(self, texts, **options)

    turns = packing_turns(source, 3, lambda name: None)
    monkeypatch.setattr(WatchedTokenizer, "_encode_bare", note_bare)
    monkeypatch.setattr(WatchedTokenizer, "encode_batch_fast", note_side)
    result = take_text_turns({"ours": turns}, 2)
    assert bare == sided and len(bare) % 3 == 0  # each of three rounds has the same documents
    once = sum(ids.size + 1 for ids in tokenizer.encode(bare[: len(bare) // 3]))
    assert result["tokens"]["ours"] == once
    assert 0 < result["inside"]["ours"] < 1 and len(result["rows"][0]["rounds"]) == 2


@pytest.mark.parametrize(("slower", "outside", "expected"), [(1.0, 0.0, 1.0), (1.25, 0.0, 0.8), (1.0, 0.2, 0.8)])
@pytest.mark.parametrize("number", [4, 5])
def test_the_ratio_follows_neither_the_machine_nor_the_order(
    slower: float, outside: float, expected: float, number: int
) -> None:
    """The machine is 1 to 9 times as slow from call to call, and the second of each call takes 0.8 of the first."""
    turns = []
    for turn in range(6):
        spent = TextTime()
        for call in range(number):
            bare_first = (turn + call) % 2 == 1
            speed = 1 + (7 * turn + 5 * call) % 9
            bare_s, inside_s = speed * (1.0 if bare_first else 0.8), speed * slower * (0.8 if bare_first else 1.0)
            spent.bare_s += bare_s
            spent.inside_s += inside_s
            spent.calls.append((bare_s / inside_s, bare_first))
        spent.own_s = spent.inside_s / (1 - outside)
        turns.append(spent)
    assert speed_ratio(turns) == pytest.approx(expected)


class SlowLane:
    """A lane whose rows take time, and no work."""

    def __init__(self, position: LanePosition) -> None:
        self._row = position[0]

    @property
    def position(self) -> LanePosition:
        """Position of the next row."""
        return self._row, 0

    def row(self) -> NDArray[np.int32]:
        """Next row."""
        time.sleep(ROW_S)
        self._row += 1
        return np.zeros(5, np.int32)


@dataclass(frozen=True)
class SlowLanes:
    """Source of such lanes, as if each worker had a core of its own."""

    def opened(self, mark: Callable[[str], None] | None = None) -> Callable[[LaneOrder, int, LanePosition], Lane]:
        """Function that opens a lane."""
        return lambda order, lane, position: SlowLane(position)


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
