"""Prepared corpora, opened for reading: any document in constant time, all of them in batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nxtrain.data.arrow.columns import FORMAT_KEY, FORMAT_VERSION, IDS, SHARD_KEY, SOURCES_KEY, TEXT, TOKENIZER_KEY
from nxtrain.data.arrow.work import Outputs, read_summary, shard_name
from nxtrain.data.files import unreadable
from nxtrain.errors import DataError
from nxtrain.io.regular import require_regular


class PreparedCorpus:
    """Documents of a prepared file, or of a folder of shards, mapped into memory.

    Opening reads the footer and the metadata of every batch, and no document.

    Args:
        path: The file or the folder.

    Attributes:
        path: The file or the folder.
        files: The file, or the shards in order.
        is_ids: Documents are token ids; else text.
        metadata: Entries of the schema's metadata.

    Raises:
        DataError: The path is no prepared corpus, is damaged, or lacks shards.
        StorageError: The storage fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = sorted(path.glob("*.arrow")) if path.is_dir() else [path]
        if not self.files:
            raise DataError(
                f"{path} holds no shard such as {shard_name(0)}; prepare a corpus with nxtrain data prepare"
            )
        self._batches: list[tuple[Any, int]] = []  # reader of the file, and number of the batch in it
        begins = [0]
        schemas = []
        for file in self.files:
            reader = _opened(file)
            schemas.append(reader.schema)
            for number in range(reader.num_record_batches):
                self._batches.append((reader, number))
                begins.append(begins[-1] + reader.get_batch(number).num_rows)
        self._begins = begins
        self.metadata: dict[bytes, bytes] = dict(schemas[0].metadata)
        self._check_shards(schemas)
        self.is_ids = schemas[0].names == [IDS]
        if not self.is_ids and schemas[0].names != [TEXT]:
            raise DataError(f"{path} has columns {schemas[0].names}, not {IDS} or {TEXT}; prepare it again")

    def __len__(self) -> int:
        """Number of documents."""
        return self._begins[-1]

    @property
    def tokenizer(self) -> str:
        """Digest of the tokenizer that made the ids; empty for text."""
        return self.metadata.get(TOKENIZER_KEY, b"").decode()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.stat().st_size for file in self.files)

    def ids(self, document: int) -> NDArray[np.unsignedinteger[Any]]:
        """Token ids of a document, which end with the end of text; a view of the mapped file."""
        column, row = self._find(document)
        found: NDArray[np.unsignedinteger[Any]] = column.slice(row, 1).flatten().to_numpy(zero_copy_only=True)
        return found

    def text(self, document: int) -> str:
        """Text of a document."""
        column, row = self._find(document)
        return str(column[row].as_py())

    def columns(self) -> Iterator[pa.Array]:
        """Column of each batch, in order.

        Raises:
            DataError: A batch is damaged.
        """
        for number, (reader, batch) in enumerate(self._batches):
            try:
                column = reader.get_batch(batch).column(0)
                column.validate()
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{self.path}, batch {number}, is damaged: {error}; prepare it again") from error
            yield column

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Lengths of the documents of each batch: tokens of ids, bytes of text."""
        for column in self.columns():
            yield np.diff(_offsets(column))

    def _find(self, document: int) -> tuple[Any, int]:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self):,}")
        number = bisect_right(self._begins, document) - 1
        reader, batch = self._batches[number]
        return reader.get_batch(batch).column(0), document - self._begins[number]

    def _check_shards(self, schemas: list[Any]) -> None:
        """Refuse shards of several corpora, and a folder without some of its shards."""
        if not self.path.is_dir():
            return
        found = [(schema.metadata.get(SOURCES_KEY), schema.metadata.get(SHARD_KEY)) for schema in schemas]
        wanted = [(found[0][0], str(number).encode()) for number in range(len(found))]
        expected = read_summary(Outputs(self.path).summary).get("shards", len(found))
        if found != wanted or expected != len(found):
            raise DataError(
                f"{self.path} holds {len(found)} shards of {expected}, or shards of several corpora; "
                "bring all shards of one preparation, or prepare it again"
            )


def is_prepared(path: Path) -> bool:
    """True if a path is a prepared file, or a folder whose first shard is there."""
    first = next(iter(sorted(path.glob("*.arrow"))), None) if path.is_dir() else path
    if first is None:
        return False
    try:
        require_regular(first)
        with pa.memory_map(str(first)) as mapped:
            return FORMAT_KEY in (pa.ipc.open_file(mapped).schema.metadata or {})
    except (OSError, pa.ArrowException):
        return False


def _opened(file: Path) -> Any:
    try:
        require_regular(file)
        reader = pa.ipc.open_file(pa.memory_map(str(file)))
    except OSError as error:
        if error.errno is not None:
            raise unreadable(f"{file}", error) from error
        raise DataError(f"{file} is damaged: {error}; prepare it again") from error
    except pa.ArrowException as error:
        raise DataError(f"{file} is no Arrow file, or is cut short: {error}; prepare it again") from error
    metadata = reader.schema.metadata or {}
    version = metadata.get(FORMAT_KEY, b"").decode()
    if version != str(FORMAT_VERSION):
        what = f"has format {version}, and this release reads {FORMAT_VERSION}" if version else "is no prepared corpus"
        raise DataError(f"{file} {what}; prepare it with nxtrain data prepare")
    return reader


def _offsets(column: Any) -> NDArray[np.int64]:
    """(n + 1,) begin of each document in the values of a column, and the end of the last."""
    offsets = np.frombuffer(column.buffers()[1], np.int64)
    return offsets[column.offset : column.offset + len(column) + 1]
