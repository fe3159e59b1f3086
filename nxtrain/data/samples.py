"""Token rows for the loader, checked before the first step and again when they are read."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.common.io.object_store import Location
from nxtrain.common.vocab import END_BIT
from nxtrain.data.files import Tokens, unreadable
from nxtrain.data.order import shuffled
from nxtrain.data.storage import DataFile, RemoteFile, read_exactly

# Tokens per chunk when a whole table is read; 32 MiB as int64.
_CHUNK_TOKENS = 1 << 22

_PROBED_ROWS = 64

_HEADER_BYTES = 1 << 17
"""Bytes in which the header of a .npy file of ids ends; a longer one is refused."""

_CHANGED = "somebody has changed it since, or this machine has another copy; leave it alone, and start again"


class Samples(ABC):
    """Token rows of one length, S = seq_len."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows in an epoch."""

    @property
    @abstractmethod
    def seq_len(self) -> int:
        """Targets in a row."""

    @abstractmethod
    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows at indices: (n,) to (n, S + 1); inputs are [:, :-1], targets [:, 1:]."""

    def ordered(self, positions: NDArray[np.int64], seed: int, *, shuffle: bool) -> NDArray[np.int64]:
        """Indices of the rows at positions of the endless order: (n,) to (n,)."""
        if shuffle:
            return shuffled(positions, self.num_rows, seed)
        return positions % self.num_rows

    def progress(self, num_rows: int) -> dict[str, float]:
        """Values for the record of a step after the first rows of the endless order; empty without a mixture."""
        del num_rows
        return {}


class TableSamples(Samples):
    """Rows of a 2-d array in memory.

    Args:
        table: (num_rows, S + 1) ids of any integer type.
    """

    def __init__(self, table: Tokens) -> None:
        self._table = table

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return len(self._table)

    @property
    def seq_len(self) -> int:
        """Targets in a row."""
        return int(self._table.shape[1]) - 1

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows at indices: (n,) to (n, S + 1)."""
        return self._table[indices].astype(np.int64)


class FileSamples(Samples):
    """Rows of a .npy file of ids, each checked when it is read.

    If the open file is modified, a sample of its rows must still match. A file that is replaced or deleted under its
    name stays open, and is read unchanged.

    Args:
        file: The open file: (num_rows, S + 1) ids.
        seq_len: Targets in a row.
        vocab_size: Size of the vocabulary; every id must be below it.
        expected: Result of `probe` for the ids that were checked.

    Raises:
        DataError: The file cannot be read, or differs from the checked ids.
    """

    def __init__(self, file: DataFile, *, seq_len: int, vocab_size: int, expected: str) -> None:
        self._file, self._expected = file, expected
        self._seq_len, self._vocab_size = seq_len, vocab_size
        self._dtype, shape, self._start = header(file)
        self._num_rows = shape[0]
        self._version = file.version()
        self._compare()

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return self._num_rows

    @property
    def seq_len(self) -> int:
        """Targets in a row."""
        return self._seq_len

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows at indices: (n,) to (n, S + 1).

        Raises:
            DataError: The file has changed; names the file and the row.
            StorageError: The file cannot be read; names the file and the row.
        """
        version = self._file.version()
        if version != self._version:
            self._compare()
            self._version = version
        return self._rows(indices)

    def _rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        stored = np.empty((indices.size, self._seq_len + 1), self._dtype)
        content = stored.view(np.uint8).reshape(indices.size, -1)
        starts = (indices * content.shape[1]).tolist()
        for start in starts:
            self._file.ahead(read_exactly, self._file, content.shape[1], self._start + start)
        for number, start in enumerate(starts):
            self._read(start, content[number].data)
        rows = stored.astype(np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self._vocab_size):
            number, column = np.argwhere((rows < 0) | (rows >= self._vocab_size))[0]
            raise DataError(
                f"{self._file.name}, row {indices[number]}, column {column}: id {stored[number, column]} is outside of "
                f"the vocabulary, 0 to {self._vocab_size - 1}, though all were inside when the run began: {_CHANGED}"
            )
        return rows

    def _read(self, start: int, content: memoryview) -> None:
        """Fill a view with the bytes at an offset, counted from the first id."""
        done, row = 0, start // len(content)
        while done < len(content):
            try:
                length = self._file.read(content[done:], self._start + start + done)
            except OSError as error:
                raise unreadable(f"{self._file.name}, row {row},", error) from error
            if not length:
                raise DataError(f"{self._file.name}, row {row}, is no longer there: the file is shorter: {_CHANGED}")
            done += length

    def _compare(self) -> None:
        if _probe(self._num_rows, self._rows) != self._expected:
            raise DataError(f"{self._file.name} does not hold what was checked when the run began: {_CHANGED}")


class EndedSamples(Samples):
    """Rows of a token file that nxtrain did not write, in which an id ends each document.

    Such a file has nothing else that tells its documents apart.
    """

    def __init__(self, samples: Samples, end_id: int) -> None:
        self._samples, self._end_id = samples, end_id

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return self._samples.num_rows

    @property
    def seq_len(self) -> int:
        """Targets in a row."""
        return self._samples.seq_len

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows at indices: (n,) to (n, S + 1), with `END_BIT` at the end of each document."""
        rows = self._samples.rows(indices)
        return np.where(rows == self._end_id, rows | END_BIT, rows)


def header(opened: DataFile) -> tuple[np.dtype[np.integer[Any]], tuple[int, ...], int]:
    """Type and shape of the ids in an open .npy file, and the offset of the first id.

    Raises:
        DataError: The file is not a .npy array of numbers, or is stored column by column.
    """
    path = opened.name
    try:
        file = io.BytesIO(read_exactly(opened, min(opened.num_bytes, _HEADER_BYTES), 0))
    except OSError as error:
        raise unreadable(f"{path}", error) from error
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except Exception as error:  # numpy reads headers with Python's parsers, and passes their errors on
        raise DataError(f"{path} is no .npy array of numbers: {error}") from error
    if is_fortran and len(shape) > 1:
        raise DataError(
            f"{path} is stored column by column; save its rows: numpy.save(path, numpy.ascontiguousarray(ids))"
        )
    return dtype, shape, file.tell()


def probe(table: Tokens) -> str:
    """Digest of a table's number of rows and of a sample of its rows; differs for most other tables."""
    return _probe(len(table), lambda indices: table[indices].astype(np.int64))


def _probe(num_rows: int, rows: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> str:
    digest = hashlib.blake2b(f"{num_rows}".encode(), digest_size=16)
    if num_rows:
        digest.update(rows(np.linspace(0, num_rows - 1, min(num_rows, _PROBED_ROWS)).astype(np.int64)).tobytes())
    return digest.hexdigest()


def check_remote(file: RemoteFile, *, seq_len: int, vocab_size: int) -> tuple[str, str]:
    """Identity of a table of ids in S3, and a sample's digest. Other rows are checked at their read.

    Args:
        seq_len: Targets in a row; the table must be seq_len + 1 wide.

    Raises:
        DataError: As for `check_table`, of the sample.
    """
    dtype, shape, start = header(file)
    check_shape(dtype, shape, file.name, seq_len)
    num_rows, width = shape
    if file.num_bytes < start + num_rows * width * dtype.itemsize:
        raise DataError(
            f"{file.name} is cut short: it has {file.num_bytes:,} bytes, and its header names {num_rows:,} rows"
        )

    def rows(indices: NDArray[np.int64]) -> NDArray[np.int64]:
        size = width * dtype.itemsize
        offsets = [start + row * size for row in indices.tolist()]
        for offset in offsets:
            file.ahead(read_exactly, file, size, offset)
        stored = np.stack([np.frombuffer(read_exactly(file, size, offset), dtype) for offset in offsets])
        _check_ids(stored, indices, file.name, vocab_size)
        return stored.astype(np.int64)

    return file.tag, _probe(num_rows, rows)


def check_table(table: NDArray[np.generic], path: Location, *, seq_len: int, vocab_size: int) -> str:
    """Read a table of ids from end to end and return the digest of its content.

    Args:
        seq_len: Targets in a row; the table must be seq_len + 1 wide.

    Raises:
        DataError: The table holds no integers, is empty or of another width, or has an id outside of the vocabulary;
            names the first bad row.
    """
    check_shape(table.dtype, table.shape, path, seq_len)
    num_rows, width = table.shape
    digest = hashlib.blake2b(f"{table.dtype} {table.shape}".encode())
    chunk_rows = -(-_CHUNK_TOKENS // width)
    for start in range(0, num_rows, chunk_rows):
        chunk = np.ascontiguousarray(table[start : start + chunk_rows])
        _check_ids(chunk, range(start, start + len(chunk)), path, vocab_size)
        digest.update(chunk.data)
    return digest.hexdigest()


def check_shape(dtype: np.dtype[Any], shape: tuple[int, ...], path: Location, seq_len: int) -> None:
    """Raise a DataError unless an array has rows of ids of the length that a run reads."""
    if len(shape) != 2 or not np.issubdtype(dtype, np.integer):  # noqa: PLR2004 - a table has 2 dimensions
        raise DataError(f"{path} holds {dtype} of shape {shape}; rows of integer ids are (rows, seq_len + 1)")
    num_rows, width = shape
    if width != seq_len + 1:
        way_out = f"set train.seq_len={width - 1}" if width > 1 else "save longer rows"
        raise DataError(f"{path} has rows of {width} ids, but train.seq_len={seq_len} reads {seq_len + 1}; {way_out}")
    if not num_rows:
        raise DataError(f"{path} has no rows")


def _check_ids(ids: Tokens, numbers: Sequence[int] | NDArray[np.int64], path: Location, vocab_size: int) -> None:
    """Refuse rows with an id outside of the vocabulary; the message names the first such row by its number."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        row, column = np.argwhere((ids < 0) | (ids >= vocab_size))[0]
        raise DataError(
            f"{path}, row {numbers[row]}, column {column}: id {ids[row, column]} is outside of the vocabulary, "
            f"0 to {vocab_size - 1}; set model.config.vocab_size to that of the tokenizer that made the file"
        )
