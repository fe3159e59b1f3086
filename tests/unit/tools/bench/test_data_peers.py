"""Peers of `nxtrain bench data` are left out one by one, and count the targets that they read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nxtrain.data.tokenization import load_tokenizer
from nxtrain.tools.bench import data_peers
from tests.support.corpora import documents, write_tokenizer


def test_a_peer_without_its_package_is_left_out_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"datasets"}
    monkeypatch.setattr(data_peers, "find_spec", lambda name: name if name in installed else None)
    wanted = {"torchtitan": "pip install torchtitan", "mosaicml-streaming": "pip install mosaicml-streaming"}
    assert data_peers.absent() == wanted
    installed.clear()
    wanted |= {"datasets.map": "pip install datasets", "torchtitan": "pip install datasets torchtitan"}
    assert data_peers.absent() == wanted
    assert data_peers.text_sides(documents(3), 0, 8, tmp_path) == {}
    assert data_peers.ids_sides(np.zeros((3, 9), np.uint16), tmp_path) == {}
    assert not (tmp_path / "datasets").exists()


class Rows:
    """The parts of a dataset of `datasets` that its side calls."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    def map(self, cut: Any, **_: object) -> Rows:
        batches = [cut({"text": self.columns["text"][begin : begin + 20]}) for begin in range(0, 60, 20)]
        return Rows({"ids": [row for batch in batches for row in batch["ids"]]})

    def with_format(self, name: str) -> Rows:
        return self

    def iter(self, number: int) -> Iterator[dict[str, Any]]:
        for begin in range(0, len(self.columns["ids"]), number):
            yield {"ids": np.array(self.columns["ids"][begin : begin + number])}


def test_rows_of_the_mapped_side_are_the_stream_of_each_batch(tmp_path: Path) -> None:
    tokenizer, texts = load_tokenizer(write_tokenizer(tmp_path / "t"), 300), documents(60)
    streams = [sum(len(ids) + 1 for ids in tokenizer.encode(texts[at : at + 20])) for at in range(0, 60, 20)]
    act = data_peers._mapped(Rows({"text": texts}), tokenizer.end_id, 8)
    assert act(tokenizer.tokenizer) == sum(length // 9 * 8 for length in streams)


def test_the_streaming_side_reads_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict[str, Any]] = []

    class Writer:
        def __init__(self, **_: object) -> None:
            self.write = written.append

        def __enter__(self) -> Writer:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing."""

    fake = SimpleNamespace(MDSWriter=Writer, StreamingDataset=lambda **_: written)
    monkeypatch.setitem(sys.modules, "streaming", fake)
    monkeypatch.setattr(data_peers, "find_spec", lambda name: name)
    (act,) = data_peers.ids_sides(np.arange(70 * 9, dtype=np.uint16).reshape(70, 9), tmp_path).values()
    assert act() == act() == 64 * 8
