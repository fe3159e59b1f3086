"""Corpora in every format that `nxtrain data prepare` reads, and a tokenizer."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nxtrain.common.io.object_store import Location
from nxtrain.common.vocab import END_BIT, IGNORE_INDEX
from nxtrain.data.arrow import ipc
from nxtrain.data.arrow.columns import CHECKSUMS_KEY
from nxtrain.data.arrow.hub_files import HubAddress
from nxtrain.data.arrow.preparation import PreparationOutcome, Watcher, prepare_corpus
from nxtrain.data.arrow.preparation_request import PreparationRequest
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.loader import Batch, batch_of
from nxtrain.data.stream_loader import Lane, LaneOrder, LanePosition
from nxtrain.data.tokenization import train_bpe

WIDTH = 5


class NumberedLane:
    """Rows of numbers that name the lane and the row."""

    def __init__(self, lane: int, position: LanePosition, mark: Callable[[str], None] | None, poison: int) -> None:
        self._lane, self._row, self._mark, self._poison = lane, position[0], mark, poison

    @property
    def position(self) -> LanePosition:
        return self._row, 0

    def row(self) -> NDArray[np.int32]:
        """Next row; the poisonous one ends the process."""
        if self._mark:
            self._mark(f"numbers.arrow, document {self._row}")
        if self._row == self._poison:
            os.kill(os.getpid(), signal.SIGSEGV)
        self._row += 1
        return np.full(WIDTH, 1000 * self._lane + self._row, np.int32)


@dataclass(frozen=True)
class NumberedLanes:
    poison: int = -1

    def opened(self, mark: Callable[[str], None] | None = None) -> Callable[[LaneOrder, int, LanePosition], Lane]:
        return lambda order, lane, position: NumberedLane(lane, position, mark, self.poison)


SEQ_LEN, END = 64, 0


def drawn_row(rng: Random, vocab_size: int, seq_len: int = SEQ_LEN) -> list[int]:
    """S + 1 marked ids: documents of drawn lengths, each with its end; the last may be cut, or padding may follow.

    The id of the end is also a word of the documents.
    """
    row: list[int] = []
    while len(row) <= seq_len:
        words = [rng.choice((END, rng.randrange(vocab_size))) for _ in range(rng.choice((0, 1, 3, 10, 30)))]
        row += [*words, END | END_BIT]
        if rng.random() < 0.1:
            row += [IGNORE_INDEX] * (seq_len + 1)
    return row[: seq_len + 1]


def spans(row: list[int]) -> list[tuple[int, int]]:
    """First and last + 1 position of each document among the inputs of a row."""
    is_last = [token == IGNORE_INDEX or token & END_BIT != 0 for token in row[:SEQ_LEN]]
    bounds = [0, *(position + 1 for position in range(SEQ_LEN) if is_last[position]), SEQ_LEN]
    return [(begin, end) for begin, end in pairwise(bounds) if begin < end]


def drawn_batch(rng: Random, vocab_size: int, rows: int) -> tuple[list[list[int]], Batch]:
    result = [drawn_row(rng, vocab_size) for _ in range(rows)]
    return result, batch_of(np.array(result), rows, end_id=END, doc_mask=True)


def rows_of_stream(stream: NDArray[Any], seq_len: int) -> NDArray[Any]:
    """Rows of a stream of tokens, each of which begins with the last token of the row before: (T,) to (n, S + 1)."""
    num_rows = max(0, stream.size - 1) // seq_len
    return np.array([stream[row * seq_len : (row + 1) * seq_len + 1] for row in range(num_rows)]).reshape(
        num_rows, seq_len + 1
    )


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
    return [f"document {item}\n{snow * (item % 7)}and \U0001f600\n" for item in range(number)]


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
        for item, part in zip(names, (texts[:half], texts[half:]), strict=True):
            write_stream(path / item, table(part))
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": item} for item in names]}))
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


def prepare(
    *sources: Location | HubAddress, out: Path, watcher: Watcher | None = None, **options: Any
) -> PreparationOutcome:
    return prepare_corpus(PreparationRequest(sources, out, **options), watcher or Watcher())


def texts_of(path: Path) -> list[str]:
    corpus = PreparedCorpus(path)
    return [corpus.text(number) for number in range(len(corpus))]


def drop_checksums(path: Path) -> None:
    """Write a prepared file as an earlier release did, without checksums."""
    with pa.memory_map(str(path)) as mapped:
        result = pa.ipc.open_file(mapped).read_all()
    metadata = {key: value for key, value in result.schema.metadata.items() if key != CHECKSUMS_KEY}
    schema = result.schema.with_metadata(metadata)
    content, blocks = ipc.begin(schema), list[ipc.Block]()
    for batch in result.to_batches():
        message, block = ipc.message(pa.record_batch(batch.columns, schema=schema), len(content))
        content += bytes(message)
        blocks.append(block)
    path.write_bytes(content + ipc.END_OF_STREAM + ipc.end(schema, blocks))


def write_tokenizer(folder: Path, vocab_size: int = 300) -> Path:
    folder.mkdir()
    train_bpe(documents(50), vocab_size, folder / "tokenizer.json")
    return folder


def contents(folder: Path) -> Mapping[str, bytes]:
    """Bytes of all files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
