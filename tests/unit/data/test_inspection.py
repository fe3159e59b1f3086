"""Statistics of a corpus are those of its documents, whose lengths are counted exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.common.errors import ConfigError, DataError
from nxtrain.data.arrow import preparation, preparation_request
from nxtrain.data.arrow.inspection import Lengths, PackingWaste, inspect_corpus
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.packing import RowPacking, best_fit
from nxtrain.data.tokenization import load_tokenizer
from tests.support.corpora import documents, prepare, rows_of_stream, write_corpus, write_tokenizer

DRAWN = st.lists(st.integers(0, 50), min_size=1, max_size=60)


def waste_of(packing: RowPacking, capacity: int) -> float:
    """Share of the positions of rows without a token."""
    return 1 - int(packing.lengths.sum()) / (packing.num_rows * capacity) if packing.num_rows else 0.0


@given(st.lists(st.integers(0, 3 << 20), min_size=1, max_size=40), st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0]))
def test_quantiles_are_those_of_the_sorted_lengths(drawn: list[int], share: float) -> None:
    lengths = Lengths()
    for part in np.array_split(np.array(drawn, np.int64), 3):
        lengths.add(part)
    assert lengths.quantile(share) == sorted(drawn)[max(0, int(np.ceil(share * len(drawn))) - 1)]
    assert (lengths.number, lengths.total) == (len(drawn), sum(drawn))


@given(DRAWN, st.integers(1, 20))
def test_waste_is_that_of_the_packed_rows(drawn: list[int], seq_len: int) -> None:
    packing, lengths = PackingWaste(seq_len), np.array(drawn, np.int64)
    for part in np.array_split(lengths, 3):
        packing.add(part)
    result = packing.to_json()
    fitted = best_fit(lengths, seq_len + 1)
    assert result["rows"]["best_fit"] == fitted.num_rows
    assert result["waste"]["best_fit"] == pytest.approx(waste_of(fitted, seq_len + 1))
    assert result["cut"]["best_fit"] == sum(length > seq_len + 1 for length in drawn)
    rows = rows_of_stream(np.arange(sum(drawn)), seq_len)
    assert result["rows"]["concat"] == len(rows)
    if sum(drawn) > 1:
        assert result["waste"]["concat"] == pytest.approx(1 - rows[:, 1:].size / (sum(drawn) - 1))
    bounds = np.cumsum([0, *drawn])
    whole = sum(
        length == 0 or any(row[0] <= begin and begin + length - 1 <= row[-1] for row in _spans(sum(drawn), seq_len))
        for begin, length in zip(bounds, drawn, strict=False)
    )
    assert result["cut"]["concat"] == len(drawn) - whole


def _spans(total: int, seq_len: int) -> list[tuple[int, int]]:
    """First and last token of each row of a stream, the unfinished last row too."""
    return [(start, start + seq_len) for start in range(0, max(total, 1), seq_len)]


@pytest.mark.parametrize("shard_bytes", [0, 2000])
def test_ids_text_and_sources_have_the_same_statistics(
    shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "BATCH_BYTES", 500)
    monkeypatch.setattr(preparation_request, "MIN_SHARD_BYTES", 0)
    folder = write_tokenizer(tmp_path / "tokenizer")
    texts = documents(100)
    source = write_corpus(tmp_path / "src", "a.jsonl.gz", texts)
    prepare(source, out=tmp_path / "text.arrow", shard_bytes=shard_bytes)
    prepare(source, out=tmp_path / "ids.arrow", tokenizer=folder, shard_bytes=shard_bytes)
    paths = (tmp_path / "ids.arrow", tmp_path / "text.arrow", source)
    result: list[dict[str, Any]] = [inspect_corpus(path, seq_len=64, tokenizer=folder) for path in paths]
    lengths = [ids.size + 1 for ids in load_tokenizer(folder, 1 << 32).encode(texts)]
    for item in result:
        assert (item["documents"], item["tokens"], item["unit"]) == (100, sum(lengths), "tokens")
        assert (item["lengths"]["min"], item["lengths"]["max"]) == (min(lengths), max(lengths))
        assert item["lengths"]["median"] == sorted(lengths)[49]
        assert item["lengths"]["p99"] == sorted(lengths)[98]
        assert item["waste"]["best_fit"] == waste_of(best_fit(np.array(lengths), 65), 65)
        assert item["samples"][0]["begins"] in texts[0]
    num_bytes = sum(len(text.encode()) for text in texts)
    assert [item["bytes"] for item in result] == [2 * sum(lengths), num_bytes, num_bytes]
    plain = inspect_corpus(tmp_path / "text.arrow", seq_len=64)
    assert (plain["tokens"], plain["unit"], plain["lengths"]["max"]) == (
        None,
        "bytes",
        max(len(t.encode()) for t in texts),
    )
    assert plain["waste"] == {"concat": None, "best_fit": None}
    bare = inspect_corpus(tmp_path / "ids.arrow", seq_len=64)
    corpus = PreparedCorpus(tmp_path / "ids.arrow")
    assert bare["samples"][1] == {"document": 50, "begins": corpus.ids(50)[:16].tolist()}


def test_another_tokenizer_and_damage_are_refused(tmp_path: Path) -> None:
    first, second = write_tokenizer(tmp_path / "first"), write_tokenizer(tmp_path / "second", 290)
    prepare(write_corpus(tmp_path / "src", "a.jsonl", documents(50)), out=tmp_path / "o.arrow", tokenizer=first)
    with pytest.raises(DataError, match="did not make the ids"):
        inspect_corpus(tmp_path / "o.arrow", seq_len=4, tokenizer=second)
    with pytest.raises(ConfigError, match="does not exist"):
        inspect_corpus(tmp_path / "absent", seq_len=4)
    content = (tmp_path / "o.arrow").read_bytes()
    (tmp_path / "o.arrow").write_bytes(content[:-100])
    result = inspect_corpus(tmp_path / "o.arrow", seq_len=4)
    assert result["skipped"] == {"truncated or damaged": 1}
    with pytest.raises(DataError, match="cut short"):
        PreparedCorpus(tmp_path / "o.arrow")
