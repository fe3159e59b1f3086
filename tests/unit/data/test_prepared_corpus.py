"""A prepared corpus holds the documents of its sources in order, whatever their format, and counts every row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nxtrain.common.errors import ConfigError, DataError, StorageError
from nxtrain.data.arrow import preparation
from nxtrain.data.arrow.columns import IDS
from nxtrain.data.arrow.inspection import inspect_corpus
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.rows import DAMAGED, INVALID_UTF8, MISSING_FIELD, WRONG_TYPE
from nxtrain.data.tokenization import load_tokenizer
from nxtrain.tools.bench.data import write_sparse
from tests.support.corpora import (
    FORMATS,
    compressed,
    contents,
    documents,
    json_lines,
    prepare,
    table,
    texts_of,
    write_corpus,
    write_file,
    write_stream,
    write_tokenizer,
)


def conserves_rows(summary: dict[str, Any]) -> bool:
    """Rows in = documents + empty rows + skipped rows."""
    return bool(summary["rows"] == summary["documents"] + summary["empty"] + sum(summary["skipped"].values()))


@pytest.mark.parametrize("name", FORMATS)
def test_documents_of_every_format_come_out_in_order(name: str, tmp_path: Path) -> None:
    texts = documents(40)
    source = write_corpus(tmp_path / "src", name, texts)
    outcome = prepare(source, out=tmp_path / "o.arrow")
    assert texts_of(tmp_path / "o.arrow") == texts
    assert (outcome.summary["rows"], outcome.summary["documents"], outcome.summary["skipped"]) == (40, 40, {})
    assert outcome.summary["bytes"] == sum(len(text.encode()) for text in texts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.arrow", "o.summary.json", "src"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, np.uint16), (300 + (1 << 16), np.uint32)])
def test_ids_are_those_of_the_tokenizer_with_the_end_of_text(vocab_size: int, dtype: type, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    if dtype is np.uint32:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["added_tokens"].append({**content["added_tokens"][0], "id": vocab_size - 1, "content": "<far>"})
        content["model"]["vocab"]["<far>"] = vocab_size - 1
        (folder / "tokenizer.json").write_text(json.dumps(content))
    texts = documents(30)
    source = write_corpus(tmp_path / "src", "a.jsonl", texts)
    outcome = prepare(source, out=tmp_path / "o.arrow", tokenizer=folder)
    tokenizer = load_tokenizer(folder, 1 << 32)
    wanted = [[*ids.tolist(), tokenizer.end_id] for ids in tokenizer.encode(texts)]
    corpus = PreparedCorpus(tmp_path / "o.arrow")
    assert [corpus.ids(number).tolist() for number in range(30)] == wanted
    assert corpus.ids(3).dtype == dtype
    assert corpus.tokenizer == tokenizer.digest
    assert outcome.summary["tokens"] == sum(map(len, wanted))
    with pa.memory_map(str(tmp_path / "o.arrow")) as mapped:
        assert pa.ipc.open_file(mapped).schema.names == [IDS]
    with pytest.raises(IndexError):
        corpus.ids(30)


def test_a_document_longer_than_a_section_keeps_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxtrain.data.arrow.columns.SECTION_CHARS", 50)
    folder = write_tokenizer(tmp_path / "tokenizer")
    texts = ["x" * 170, "line\n" * 40, "short", "y" * 100]
    prepare(write_corpus(tmp_path / "src", "a.jsonl", texts), out=tmp_path / "o.arrow", tokenizer=folder)
    tokenizer = load_tokenizer(folder, 1 << 32)
    corpus = PreparedCorpus(tmp_path / "o.arrow")
    assert [tokenizer.tokenizer.decode(corpus.ids(n).tolist()) for n in range(4)] == texts
    assert all(corpus.ids(n).tolist().count(tokenizer.end_id) == 1 for n in range(4))


def test_shards_hold_the_same_documents_and_a_missing_one_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "BATCH_BYTES", 1 << 14)
    texts = [f"{number} " * 300 for number in range(400)]
    source = write_corpus(tmp_path / "src", "a.jsonl", texts)
    prepare(source, out=tmp_path / "o.arrow", shard_bytes=1 << 16)
    shards = sorted((tmp_path / "o.arrow").iterdir())
    assert len(shards) > 3
    assert max(path.stat().st_size for path in shards) < 2 << 16
    assert texts_of(tmp_path / "o.arrow") == texts
    shards[-1].unlink()
    with pytest.raises(DataError, match=f"{len(shards) - 1} shards of {len(shards)}"):
        PreparedCorpus(tmp_path / "o.arrow")


BAD_LINES = {
    b'{"text": "\xff"}': INVALID_UTF8,
    b'{"text": "\\ud800"}': INVALID_UTF8,
    b'{"text": "x"': "broken JSON",
    b"[" * 100_000: "broken JSON",
    b'{"other": "x"}': MISSING_FIELD,
    b'{"text": null}': MISSING_FIELD,
    b'{"text": 7}': WRONG_TYPE,
    b'["text"]': WRONG_TYPE,
    b'"text"': WRONG_TYPE,
}


@pytest.mark.parametrize("line", BAD_LINES, ids=[f"{line[:20]!r}" for line in BAD_LINES])
def test_a_bad_line_stops_with_its_place_or_is_skipped_and_counted(line: bytes, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": " "}\n{"text": "two"}')
    with pytest.raises(DataError, match=rf"a\.jsonl, row 2: {BAD_LINES[line]}: .*\n    to skip .*--on-bad skip"):
        prepare(source, out=tmp_path / "o.arrow")
    outcome = prepare(source, out=tmp_path / "o.arrow", on_bad="skip")
    assert texts_of(tmp_path / "o.arrow") == ["one", "two"]
    assert (outcome.summary["skipped"], outcome.summary["empty"]) == ({BAD_LINES[line]: 1}, 1)
    assert conserves_rows(outcome.summary)
    (bad,) = map(json.loads, (tmp_path / "o.bad.jsonl").read_text().splitlines())
    assert (bad["file"], bad["row"], bad["rows"], bad["reason"]) == (str(source), 2, 1, BAD_LINES[line])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_null_is_named_as_such(name: str, tmp_path: Path) -> None:
    """A list of the fields, with the missing one among them, would mislead."""
    table = pa.table({"text": pa.array(["one", None])})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    with pytest.raises(DataError, match=r'row 2: missing field: "text" is null'):
        prepare(tmp_path / name, out=tmp_path / "o.arrow")


def test_a_line_above_the_limit_is_bad_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nxtrain.data.arrow.rows.split_lines.__defaults__", (1000, 300))
    (tmp_path / "a.jsonl").write_bytes(json_lines(["one", "x" * 5000, "two", "y" * 1100]))
    outcome = prepare(tmp_path / "a.jsonl", out=tmp_path / "o.arrow", on_bad="skip")
    assert texts_of(tmp_path / "o.arrow") == ["one", "two"]
    assert (outcome.summary["skipped"], outcome.summary["rows"]) == ({"too long": 2}, 4)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.arrow", "stream.arrow", "a.parquet"])
def test_a_truncated_file_keeps_what_is_whole_and_counts_the_rest(name: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    texts = [f"{number} {random.bytes(500).hex()}" for number in range(4000)]
    source = write_corpus(tmp_path / "src", name, texts)
    source.write_bytes(source.read_bytes()[: source.stat().st_size * 3 // 4])
    good = write_corpus(tmp_path / "src", "z.jsonl", ["last"])
    with pytest.raises(DataError, match=rf"{name}, row [\d,]+: {DAMAGED}: "):
        prepare(source, good, out=tmp_path / "o.arrow")
    outcome = prepare(source, good, out=tmp_path / "o.arrow", on_bad="skip")
    result = texts_of(tmp_path / "o.arrow")
    assert result == [*texts[: len(result) - 1], "last"]
    assert len(result) > 1000 or name in {"a.arrow", "a.parquet"}, "their index is at the end"
    assert outcome.summary["skipped"] == {DAMAGED: 1}
    assert conserves_rows(outcome.summary)


def test_a_damaged_row_group_does_not_hide_the_next(tmp_path: Path) -> None:
    texts = [f"{number} {'text ' * 20}" for number in range(300)]
    source = tmp_path / "a.parquet"
    pq.write_table(table(texts), source, row_group_size=100, compression="none", use_dictionary=False)
    content = bytearray(source.read_bytes())
    offset = pq.ParquetFile(source).metadata.row_group(1).column(1).data_page_offset
    content[offset : offset + 30] = bytes(30)
    source.write_bytes(content)
    outcome = prepare(source, out=tmp_path / "o.arrow", on_bad="skip")
    assert texts_of(tmp_path / "o.arrow") == [*texts[:100], *texts[200:]]
    assert outcome.summary["skipped"] == {DAMAGED: 100}
    (bad,) = map(json.loads, (tmp_path / "o.bad.jsonl").read_text().splitlines())
    assert (bad["row"], bad["rows"]) == (101, 100)


@pytest.mark.parametrize("write", [write_file, write_stream])
def test_rows_of_a_table_without_text_are_counted(write: object, tmp_path: Path) -> None:
    assert callable(write)
    write(tmp_path / "numbers.arrow", pa.table({"text": list(range(20))}))
    write(tmp_path / "other.arrow", pa.table({"content": documents(30)}))
    write(tmp_path / "nulls.arrow", table(["one", None, "two"]))
    write(tmp_path / "bytes.arrow", table([b"three", b"\xff", b"four"], pa.binary()))
    names = ("numbers", "other", "nulls", "bytes")
    outcome = prepare(*(tmp_path / f"{n}.arrow" for n in names), out=tmp_path / "o.arrow", on_bad="skip")
    assert texts_of(tmp_path / "o.arrow") == ["one", "two", "three", "four"]
    assert outcome.summary["skipped"] == {WRONG_TYPE: 20, MISSING_FIELD: 31, INVALID_UTF8: 1}
    assert conserves_rows(outcome.summary)
    prepare(tmp_path / "other.arrow", out=tmp_path / "p.arrow", field="content")
    assert texts_of(tmp_path / "p.arrow") == documents(30)


def test_invalid_utf8_in_a_column_of_strings_is_found(tmp_path: Path) -> None:
    column = pa.array([b"one", b"\xfe\xff", b"two"], pa.binary()).view(pa.string())
    write_file(tmp_path / "a.arrow", pa.table({"text": column}))
    outcome = prepare(tmp_path / "a.arrow", out=tmp_path / "o.arrow", on_bad="skip")
    assert texts_of(tmp_path / "o.arrow") == ["one", "two"]
    assert outcome.summary["skipped"] == {INVALID_UTF8: 1}


def test_text_files_that_are_no_text_are_counted_and_lines_can_be_documents(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name, content in {
        "a": b"\xef\xbb\xbfone\r\n\n two\n",
        "b": b"x\0y",
        "c": b"\xff",
        "d": b"",
        "e": b"\n",
    }.items():
        (tmp_path / "src" / f"{name}.txt").write_bytes(content)
    outcome = prepare(tmp_path / "src", out=tmp_path / "o.arrow", on_bad="skip")
    assert texts_of(tmp_path / "o.arrow") == ["one\r\n\n two\n"]
    assert outcome.summary["skipped"] == {"binary": 1, INVALID_UTF8: 1}
    assert (outcome.summary["rows"], outcome.summary["empty"]) == (5, 2)
    prepare(tmp_path / "src" / "a.txt", out=tmp_path / "p.arrow", lines=True)
    assert texts_of(tmp_path / "p.arrow") == ["one", " two"]


def test_a_finished_corpus_is_recognised_and_another_is_refused(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "src", "a.jsonl", documents(9))
    out = tmp_path / "o.arrow"
    assert prepare(source, out=out).is_new
    before = contents(tmp_path)
    assert not prepare(source, out=out).is_new
    assert contents(tmp_path) == before
    with pytest.raises(DataError, match=r"--restart\n.*lines: False there, True here"):
        prepare(source, out=out, lines=True)
    source.write_bytes(source.read_bytes().replace(b"document 3", b"document 4"))
    with pytest.raises(DataError, match=r"other input; choose another --out.*--restart\n.*the source files differ"):
        prepare(source, out=out)
    assert contents(out.parent / "src").keys() == {"a.jsonl"}
    assert prepare(source, out=out, restart=True).is_new
    assert texts_of(out)[3].startswith("document 4")
    (tmp_path / "mine.arrow").write_bytes(b"mine")
    with pytest.raises(DataError, match="not a prepared corpus"):
        prepare(source, out=tmp_path / "mine.arrow")
    assert (tmp_path / "mine.arrow").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["absent"], {}, "absent does not exist"),
        (["src"], {"out": "o.txt"}, "another ending"),
        (["src"], {"out": "src/o.arrow"}, "lies in the source"),
        (["src/a.jsonl"], {"out": "src/../src/a.jsonl.arrow", "only": "*.csv"}, ""),
        (["src"], {"only": "*.csv"}, "no file that matches"),
        (["src"], {"shard_bytes": 5}, "below"),
        (["src"], {"tokenizer": "absent"}, "--tokenizer"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    arguments: list[str], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "src", "a.jsonl", documents(3))
    given: dict[str, Any] = {
        key: tmp_path / str(value) if key in {"out", "tokenizer"} else value for key, value in options.items()
    }
    given.setdefault("out", tmp_path / "o.arrow")
    sources = [tmp_path / argument for argument in arguments]
    if not message:
        assert prepare(*sources, **given).is_new
        return
    with pytest.raises(ConfigError, match=message):
        prepare(*sources, **given)
    assert not (tmp_path / "o.arrow.partial").exists()


def test_unknown_formats_mixtures_and_splits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(DataError, match=r"a\.bin has an unknown format; give text in UTF-8, JSON Lines .*Parquet"):
        prepare(tmp_path / "a.bin", out=tmp_path / "o.arrow")
    (tmp_path / "a.json").write_text('[\n{"text": "one"}\n]')
    with pytest.raises(DataError, match="one JSON document"):
        prepare(tmp_path / "a.json", out=tmp_path / "o.arrow")
    (tmp_path / "a.parquet.gz").write_bytes(compressed(b"PAR1....", "gzip"))
    with pytest.raises(DataError, match="Parquet inside gzip"):
        prepare(tmp_path / "a.parquet.gz", out=tmp_path / "o.arrow")
    mixed = write_corpus(tmp_path / "mixed", "a.parquet", documents(3)).parent
    (mixed / "README.md").write_text("A data set.")
    with pytest.raises(DataError, match=r"README\.md would be a document .*--only '\*\.parquet'"):
        prepare(mixed, out=tmp_path / "o.arrow")
    prepare(mixed, out=tmp_path / "o.arrow", only="*.parquet")
    assert texts_of(tmp_path / "o.arrow") == documents(3)
    prepare(mixed, out=tmp_path / "all.arrow", mixed=True)
    assert texts_of(tmp_path / "all.arrow") == ["A data set.", *documents(3)]
    assert inspect_corpus(mixed, seq_len=8, mixed=True)["documents"] == 4
    for split in ("train", "test"):
        write_corpus(tmp_path / "hub" / split, "save_to_disk", documents(4)).rename(tmp_path / "hub" / split / "x")
    (tmp_path / "hub" / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=r"several splits; give one of them: .*train"):
        prepare(tmp_path / "hub", out=tmp_path / "p.arrow")


def test_sources_without_a_document_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ""}\n{"text": 3}\n')
    with pytest.raises(DataError, match="no document: 2 rows, 1 of them empty, 1 bad rows"):
        prepare(tmp_path / "a.jsonl", out=tmp_path / "o.arrow", on_bad="skip")
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl"}


def test_opening_reads_a_few_kilobytes_of_each_batch_and_maps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped batch is read ahead by the system, which for all batches is the whole file."""
    num_documents = write_sparse(tmp_path / "o.arrow", 96 << 20)
    read, result = os.preadv, list[int]()

    def counted(file: int, buffers: list[memoryview], start: int) -> int:
        result.append(read(file, buffers, start))
        return result[-1]

    def refuse(path: str) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(pa, "memory_map", refuse)
    corpus = PreparedCorpus(tmp_path / "o.arrow")
    assert len(corpus) == num_documents
    assert 0 < sum(result) < 12 * (20 << 10) + (20 << 10)
    assert [corpus.content(number) for number in (0, num_documents - 1)] == [bytes(4096)] * 2


def test_a_document_is_empty_where_str_strip_finds_nothing(tmp_path: Path) -> None:
    blanks = [chr(code) for code in range(0x110000) if chr(code).isspace()]
    texts = [*blanks, " \u2028\n\u3000", "\u200b", "\u2028x"]
    outcome = prepare(write_corpus(tmp_path, "a.jsonl", texts), out=tmp_path / "o.arrow")
    assert texts_of(tmp_path / "o.arrow") == [text for text in texts if text.strip()]
    assert outcome.summary["empty"] == len(blanks) + 1


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((ConfigError, DataError, StorageError), match="loop"):
        prepare(tmp_path / "loop", out=tmp_path / "o.arrow")


@pytest.mark.parametrize("as_ids", [True, False])
def test_a_changed_letter_anywhere_is_another_corpus(as_ids: bool, tmp_path: Path) -> None:
    """The sources are compared by samples; runs, stored references and results of evaluations by the whole corpus."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer") if as_ids else None
    texts = [f"document {number:05} is a" for number in range(6000)]
    identities = []
    for changed in (None, None, 0, 1500, 3000, 4500, 5999):
        given = [*texts]
        if changed is not None:
            given[changed] = given[changed][:-1] + "b"
        (tmp_path / "a.txt").write_text("\n".join(given), encoding="utf-8")
        prepare(tmp_path / "a.txt", out=tmp_path / "o.arrow", lines=True, tokenizer=tokenizer, restart=True)
        identities.append(PreparedCorpus(tmp_path / "o.arrow").identity)
    assert identities[0] == identities[1]
    assert len(set(identities)) == 6
