"""Damaged Arrow and Parquet files never end the process: each is an error, or skips that are counted.

pyarrow 26 ends the process by a signal for some of these files, for example when it casts views behind nulls.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import DataError
from nxtrain.data.arrow.inspection import inspect_corpus
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.tables import document_bytes
from tests.support.corpora import documents, drop_checksums, prepare, write_corpus, write_file, write_tokenizer
from tests.unit.data.test_drawn_sources import check

TYPES = (
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
    *(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.uint32(), pa.large_string())),
)
TEXTS = st.lists(
    st.sampled_from(["", "a", "\u00e9" * 3, "text of more than twelve bytes", None]), min_size=1, max_size=20
)
DAMAGE = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from([b"\xff" * 8, b"\xff\xff\xff\x7f", bytes(4)])),
    ),
    min_size=1,
    max_size=4,
)
LIMIT = 1 << 20


def column(texts: Sequence[str | None], kind: Any) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(texts, pa.string()).dictionary_encode().cast(kind)
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return pa.array(texts if is_text else [text and text.encode() for text in texts], kind)


def damaged(content: bytes, damage: Sequence[tuple[float, bytes]]) -> bytes:
    changed = bytearray(content)
    for offset, new in damage:
        at = int(offset * (len(changed) - 1))
        changed[at : at + len(new)] = new
    return bytes(changed)


@settings(max_examples=150)
@given(TEXTS, st.sampled_from(TYPES), st.sampled_from([None, None, "zstd", "lz4"]), st.booleans(), DAMAGE)
def test_drawn_damage_of_every_type_of_text(
    texts: list[str | None], kind: Any, compression: str | None, is_file: bool, damage: list[tuple[float, bytes]]
) -> None:
    content = pa.table({"id": range(len(texts)), "text": column(texts, kind)})
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.arrow"
        with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(str(source), content.schema, options=options) as file:
            file.write_table(content, max_chunksize=7)
        source.write_bytes(damaged(source.read_bytes(), damage))
        check(source, Path(folder) / "o.arrow")


@settings(max_examples=60)
@given(TEXTS, st.sampled_from(["none", "snappy", "zstd", "lz4"]), st.booleans(), DAMAGE)
def test_drawn_damage_of_parquet(
    texts: list[str | None], compression: str, dictionary: bool, damage: list[tuple[float, bytes]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.parquet"
        content = pa.table({"text": pa.array(texts, pa.string())})
        pq.write_table(content, source, row_group_size=7, compression=compression, use_dictionary=dictionary)
        source.write_bytes(damaged(source.read_bytes(), damage))
        check(source, Path(folder) / "o.arrow")


@pytest.fixture(scope="module", params=["text", "ids"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("prepared")
    options: dict[str, Any] = {"tokenizer": write_tokenizer(folder / "tokenizer")} if request.param == "ids" else {}
    prepare(write_corpus(folder / "src", "a.jsonl", documents(20)), out=folder / "o.arrow", **options)
    drop_checksums(folder / "o.arrow")  # with checksums all damage is found before a number is used
    return (folder / "o.arrow").read_bytes()


@settings(max_examples=150)
@given(DAMAGE, st.floats(0.3, 1))
def test_drawn_damage_of_a_prepared_corpus(prepared: bytes, damage: list[tuple[float, bytes]], share: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "o.arrow"
        content = damaged(prepared, damage)
        path.write_bytes(content[: int(len(content) * share)] if share < 0.4 else content)
        try:
            inspect_corpus(path, seq_len=8)
            corpus = PreparedCorpus(path)
            assert all(len(corpus.ids(n) if corpus.is_ids else corpus.text(n)) < LIMIT for n in range(len(corpus)))
        except DataError as error:
            assert any(way in str(error) for way in ("prepare it", "holds no document", "uncompress it"))


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize(("start", "number"), [(0, 19), (3, 11), (18, 1), (5, 0)])
def test_documents_are_those_of_pyarrow(kind: Any, start: int, number: int) -> None:
    texts = [None if n % 5 == 4 else "\u00e9" * n for n in range(19)]
    part = column(texts, kind).slice(start, number)
    wanted = [text if text is None else text.encode() for text in texts[start : start + number]]
    assert list(document_bytes(part, LIMIT)) == wanted
    short = [text if text is None or len(text) <= 20 else len(text) for text in wanted]
    assert list(document_bytes(part, 20)) == short


def buffer(*numbers: int, dtype: type = np.int32) -> pa.Buffer:
    return pa.py_buffer(np.array(numbers, dtype).tobytes())


NO_NULLS, TEXT = None, pa.py_buffer(b"twelve bytes and more")
VIEW_OUTSIDE = pa.py_buffer(struct.pack("<i4sii", 16, b"twel", 0, 6))
DAMAGED = {
    "descending offsets": (pa.string(), 2, [NO_NULLS, buffer(0, 5, 3), TEXT]),
    "negative offset": (pa.string(), 1, [NO_NULLS, buffer(-4, 5), TEXT]),
    "end behind the text": (pa.large_string(), 1, [NO_NULLS, buffer(0, 22, dtype=np.int64), TEXT]),
    "too few offsets": (pa.string(), 3, [NO_NULLS, buffer(0, 5, 6), TEXT]),
    "no text": (pa.string(), 1, [NO_NULLS, buffer(0, 5), None]),
    "too few nulls": (pa.string(), 9, [pa.py_buffer(b"\x01"), buffer(*range(10)), TEXT]),
    "view behind the text": (pa.binary_view(), 1, [NO_NULLS, VIEW_OUTSIDE, TEXT]),
    "view of no buffer": (pa.string_view(), 1, [NO_NULLS, VIEW_OUTSIDE]),
    "too few views": (pa.string_view(), 2, [NO_NULLS, VIEW_OUTSIDE, TEXT]),
}


@pytest.mark.parametrize(("kind", "number", "buffers"), DAMAGED.values(), ids=DAMAGED)
def test_no_number_of_a_file_leads_out_of_its_buffers(kind: Any, number: int, buffers: list[Any]) -> None:
    with pytest.raises(pa.ArrowInvalid):
        list(document_bytes(pa.Array.from_buffers(kind, number, buffers), LIMIT))


@pytest.mark.parametrize("index", [-1, 2, 100])
def test_an_index_without_its_entry(index: int) -> None:
    indices = pa.array([0, index], pa.int8())
    result = pa.DictionaryArray.from_arrays(indices, pa.array(["a", "b"]), safe=False)
    with pytest.raises(pa.ArrowInvalid, match=f"entry {index} of a dictionary of 2"):
        list(document_bytes(result, LIMIT))


def test_a_view_behind_a_null_is_not_followed() -> None:
    views = struct.pack("<i4sii", 3, b"one\0", 0, 0) + struct.pack("<i4sii", 1 << 30, b"????", 99, 1 << 30)
    result = pa.Array.from_buffers(pa.binary_view(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(views), TEXT])
    assert list(document_bytes(result, LIMIT)) == [b"one", None]


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_a_name_of_a_column_that_is_no_utf8(suffix: str, tmp_path: Path) -> None:
    source, content = tmp_path / f"a{suffix}", pa.table({"text": ["x"]})
    if suffix == ".arrow":
        write_file(source, content)
    else:
        pq.write_table(content, source, store_schema=False)
    source.write_bytes(source.read_bytes().replace(b"text", b"\xff\xfext"))
    with pytest.raises(DataError, match=r"row 1: truncated or damaged.*utf-8"):
        prepare(source, out=tmp_path / "o.arrow")
