"""Corpora in every format that `nxtrain data prepare` reads, and a tokenizer."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nxtrain.common.io.object_store import Location
from nxtrain.data.arrow import ipc
from nxtrain.data.arrow.columns import CHECKSUMS_KEY
from nxtrain.data.arrow.preparation import PreparationOutcome, PreparationRequest, Watcher, prepare_corpus
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.tokenization import train_bpe

FORMATS = (
    "text",
    "a.jsonl",
    "a.jsonl.gz",
    "a.jsonl.zst",
    "a.json.gz",
    "a.parquet",
    "a.arrow",
    "a.feather",
    "stream.arrow",
    "dictionary.arrow",
    "save_to_disk",
)


def documents(number: int) -> list[str]:
    """Different documents, with letters of several bytes and ends of lines."""
    snow = "snow \u2603 "
    return [f"document {each}\n{snow * (each % 7)}and \U0001f600\n" for each in range(number)]


def table(texts: Sequence[object], kind: Any = None) -> pa.Table:
    return pa.table({"id": list(range(len(texts))), "text": pa.array(texts, kind or pa.string())})


def write_stream(path: Path, content: pa.Table, rows: int = 7) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=rows)


def write_file(path: Path, content: pa.Table, rows: int = 7) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=rows)


def json_lines(texts: Sequence[object]) -> bytes:
    return b"".join(json.dumps({"id": number, "text": text}).encode() + b"\n" for number, text in enumerate(texts))


def compressed(content: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def write_corpus(folder: Path, name: str, texts: Sequence[str], row_group_size: int = 10) -> Path:
    """Write documents in a format of `FORMATS`, and return the path to read."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if name == "text":
        path.mkdir()
        for number, text in enumerate(texts):
            (path / f"{number:05}.txt").write_bytes(text.encode())
    elif ".json" in name:
        content = json_lines(texts)
        codec = {".gz": gzip.compress, ".zst": lambda plain: compressed(plain, "zstd")}.get(path.suffix)
        path.write_bytes(codec(content) if codec else content)
    elif name == "a.parquet":
        pq.write_table(table(texts), path, row_group_size=row_group_size)
    elif name == "save_to_disk":
        path.mkdir()
        half = len(texts) // 2
        names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        for each, part in zip(names, (texts[:half], texts[half:]), strict=True):
            write_stream(path / each, table(part))
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": each} for each in names]}))
        (path / "dataset_info.json").write_text("{}")
    elif name == "stream.arrow":
        write_stream(path, table(texts, pa.large_string()))
    elif name == "dictionary.arrow":
        coded = pa.array(texts, pa.string()).dictionary_encode()
        write_file(path, pa.table({"text": coded}), rows=len(texts))
    elif name == "a.feather":
        write_file(path, table(texts, pa.string_view()))
    else:
        write_file(path, table(texts))
    return path


def prepare(*sources: Location, out: Path, watcher: Watcher | None = None, **options: Any) -> PreparationOutcome:
    return prepare_corpus(PreparationRequest(sources, out, **options), watcher or Watcher())


def texts_of(path: Path) -> list[str]:
    corpus = PreparedCorpus(path)
    return [corpus.text(number) for number in range(len(corpus))]


def drop_checksums(path: Path) -> None:
    """Write a prepared file as an earlier release did, without checksums."""
    with pa.memory_map(str(path)) as mapped:
        found = pa.ipc.open_file(mapped).read_all()
    metadata = {key: value for key, value in found.schema.metadata.items() if key != CHECKSUMS_KEY}
    schema = found.schema.with_metadata(metadata)
    content, blocks = ipc.begin(schema), list[ipc.Block]()
    for batch in found.to_batches():
        message, block = ipc.message(pa.record_batch(batch.columns, schema=schema), len(content))
        content += bytes(message)
        blocks.append(block)
    path.write_bytes(content + ipc.END_OF_STREAM + ipc.end(schema, blocks))


def write_tokenizer(folder: Path, vocab_size: int = 300) -> Path:
    """A folder with a byte-level BPE."""
    folder.mkdir()
    train_bpe(documents(50), vocab_size, folder / "tokenizer.json")
    return folder


def contents(folder: Path) -> Mapping[str, bytes]:
    """Bytes of all files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
