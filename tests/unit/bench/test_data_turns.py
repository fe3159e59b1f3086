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

from nxtrain.bench import data_turns
from nxtrain.bench.data_turns import Turn, packing_turns, take_text_turns
from nxtrain.bench.data_wait import MOST_WAITING, share_waiting
from nxtrain.data.arrow.lanes import CorpusLanes
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.stream_loader import Lane, LaneOrder, Place
from nxtrain.data.tokenization import load_tokenizer
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
    seen: dict[str, list[list[str]]] = {"side": [], "bare": []}
    encode, watch = data_turns.encode_all, data_turns.WatchedTokenizer.encode_batch_fast

    def encode_all(tokenizer: Any, texts: Any) -> int:
        seen["bare"].append(list(texts))
        return encode(tokenizer, texts)

    def watched(self: Any, texts: list[str], **options: Any) -> Any:
        seen["side"][-1] += texts
        return watch(self, texts, **options)

    seen["side"].append([])
    turns = packing_turns(source, 3, lambda name: None)
    monkeypatch.setattr(data_turns, "encode_all", encode_all)
    monkeypatch.setattr(data_turns.WatchedTokenizer, "encode_batch_fast", watched)
    acts = [Turn(lambda act=turn.act: (seen["side"].append([]), act())[1], turn.texts) for turn in turns]  # type: ignore[misc,func-returns-value]
    found = take_text_turns({"ours": acts}, tokenizer, 2)
    told = [text for turn in turns for text in turn.texts]
    assert seen["bare"][0] == told and sorted(map(tuple, seen["side"][1:])) == sorted(map(tuple, seen["bare"][1:]))
    assert len(seen["bare"]) == 1 + 3 * 3
    assert found["tokens"]["ours"] == encode(tokenizer, told)
    assert 0 < found["inside"]["ours"] < 1 and len(found["rows"][0]["rounds"]) == 2


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
def test_the_rate_without_a_wait_grows_with_the_workers() -> None:
    """A row of the device takes a quarter of a worker's: eight keep it busy, and each halving below four waits."""
    order = LaneOrder(8, 0, True)
    shares = {n: share_waiting(SlowLanes(), order, n, ROW_S / 4, steps=20, rows=8) for n in (1, 2, 8)}
    assert shares[8] < MOST_WAITING
    assert shares[2] == pytest.approx(1 / 2, abs=0.1)
    assert shares[1] == pytest.approx(3 / 4, abs=0.1)
