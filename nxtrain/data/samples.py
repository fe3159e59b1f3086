"""What a loader draws from: token rows, checked before the first step and again as they are read."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nxtrain.data.checksums import Checksums, VerifiedBlocks, changed
from nxtrain.data.files import Tokens, unreadable
from nxtrain.errors import DataError
from nxtrain.io.regular import open_regular

# Tokens handled at once where a whole table is read; 32 MiB as int64.
_CHUNK_TOKENS = 1 << 22

_PROBED_ROWS = 64

_CHANGED = "somebody has changed it since, or this machine has another copy; leave it alone, and start again"


class Samples(Protocol):
    """Token rows of one length, S = seq_len."""

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        ...

    @property
    def seq_len(self) -> int:
        """Targets in a row."""
        ...

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows at these indices: (n,) to (n, S + 1); inputs are [:, :-1], targets [:, 1:]."""
        ...


class TableSamples:
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
        """The rows at these indices: (n,) to (n, S + 1)."""
        return self._table[indices].astype(np.int64)


class FileSamples:
    """Rows of a .npy file of ids, each checked as it is read.

    The file is read, not mapped: a mapped page that is gone ends a process by a signal, without a word. Where the file
    is changed while it is open, a sample of it must still be what it was; one that is replaced or deleted under its
    name is read on as it was.

    Args:
        path: The file: (num_rows, S + 1) ids, or a stream of them, of which each row begins with the last of the row
            before.
        seq_len: Targets in a row.
        vocab_size: Every id must be below it.
        expected: What `probe` gave for the ids that were checked.
        checksums: Of the file, to which every block is held as it is read; None: the file has none.

    Raises:
        DataError: The file cannot be read, or is not what was checked.
    """

    def __init__(
        self, path: Path, *, seq_len: int, vocab_size: int, expected: str, checksums: Checksums | None = None
    ) -> None:
        self._path, self._seq_len, self._vocab_size, self._expected = path, seq_len, vocab_size, expected
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise unreadable(f"{path}", error) from error
        weakref.finalize(self, os.close, self._file)
        self._dtype, shape, self._start = header(path, self._file)
        self._verified: VerifiedBlocks | None = None
        if checksums is not None:
            if not checksums.is_header(os.pread(self._file, self._start, 0)):
                raise changed(path, "its header is")
            self._verified = VerifiedBlocks(path, checksums, self._read)
        is_stream = len(shape) == 1
        self._stride = seq_len if is_stream else seq_len + 1
        self._num_rows = max(0, shape[0] - 1) // seq_len if is_stream else shape[0]
        self._version = self._stat()
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
        """The rows at these indices: (n,) to (n, S + 1).

        Raises:
            DataError: The file is not what it was; names it, and the row.
            StorageError: It cannot be read; the same.
        """
        if (version := self._stat()) != self._version:
            if self._verified is not None:
                self._verified.forget()
            self._compare()
            self._version = version
        return self._rows(indices)

    def _rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.empty((indices.size, self._seq_len + 1), self._dtype)
        content = found.view(np.uint8).reshape(indices.size, -1)
        fill = self._read if self._verified is None else self._verified.fill
        for place, row in enumerate(indices.tolist()):
            fill(row * self._stride * self._dtype.itemsize, content[place].data)
        rows = found.astype(np.int64)
        wrong = (rows < 0) | (rows >= self._vocab_size)
        if wrong.any():
            place, column = np.argwhere(wrong)[0]
            raise DataError(
                f"{self._path}, row {indices[place]}, column {column}: id {found[place, column]} is outside of the "
                f"vocabulary, 0 to {self._vocab_size - 1}, though all were inside when the run began: {_CHANGED}"
            )
        return rows

    def _read(self, start: int, content: memoryview) -> None:
        """Fill a view with the ids from a byte on, counted from the first id."""
        done, row = 0, start // (self._stride * self._dtype.itemsize)
        while done < len(content):
            try:
                length = os.preadv(self._file, [content[done:]], self._start + start + done)
            except OSError as error:
                raise unreadable(f"{self._path}, row {row},", error) from error
            if not length:
                raise DataError(f"{self._path}, row {row}, is no longer there: the file is shorter: {_CHANGED}")
            done += length

    def _compare(self) -> None:
        if _probe(self._num_rows, self._rows) != self._expected:
            raise DataError(f"{self._path} does not hold what was checked when the run began: {_CHANGED}")

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns


def header(path: Path, descriptor: int) -> tuple[np.dtype[np.integer[Any]], tuple[int, ...], int]:
    """Type and shape of the ids in an open .npy file, and where they begin.

    Raises:
        DataError: It has other content, or the file is shorter.
    """
    with open(descriptor, "rb", closefd=False) as file:
        try:
            file.seek(0)
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
            start = file.tell()
        except OSError as error:
            raise unreadable(f"{path}", error) from error
        except Exception as error:  # numpy reads headers with parsers of Python, and passes on what these raise
            raise DataError(f"{path} is no .npy array of numbers: {error}") from error
    if is_fortran and len(shape) > 1:
        raise DataError(
            f"{path} is stored column by column; save its rows: numpy.save(path, numpy.ascontiguousarray(ids))"
        )
    return dtype, shape, start


def probe(table: Tokens) -> str:
    """What tells a table from most others: its number of rows, and a sample of them."""
    return _probe(len(table), lambda indices: table[indices].astype(np.int64))


def _probe(num_rows: int, rows: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> str:
    digest = hashlib.blake2b(f"{num_rows}".encode(), digest_size=16)
    if num_rows:
        digest.update(rows(np.linspace(0, num_rows - 1, min(num_rows, _PROBED_ROWS)).astype(np.int64)).tobytes())
    return digest.hexdigest()


def check_table(table: NDArray[np.generic], path: Path, *, seq_len: int, vocab_size: int) -> str:
    """Read a table of ids from end to end and return the digest of its content.

    Args:
        table: What the file holds.
        path: The file, for messages.
        seq_len: Targets in a row; the table must be seq_len + 1 wide.
        vocab_size: Every id must be below it.

    Raises:
        DataError: Not a table of integers, empty, of another width, or with an id outside of the vocabulary; names the
            first bad row.
    """
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):  # noqa: PLR2004 - a table has 2 dimensions
        raise DataError(
            f"{path} holds {table.dtype} of shape {table.shape}; rows of integer ids are (rows, seq_len + 1)"
        )
    num_rows, width = table.shape
    if width != seq_len + 1:
        way_out = f"set train.seq_len={width - 1}" if width > 1 else "save longer rows"
        raise DataError(f"{path} has rows of {width} ids, but train.seq_len={seq_len} reads {seq_len + 1}; {way_out}")
    if not num_rows:
        raise DataError(f"{path} has no rows")
    digest = hashlib.blake2b(f"{table.dtype} {table.shape}".encode())
    chunk_rows = -(-_CHUNK_TOKENS // width)
    for start in range(0, num_rows, chunk_rows):
        chunk = np.ascontiguousarray(table[start : start + chunk_rows])
        if int(chunk.min()) < 0 or int(chunk.max()) >= vocab_size:
            row, column = np.argwhere((chunk < 0) | (chunk >= vocab_size))[0]
            raise DataError(
                f"{path}, row {start + row}, column {column}: id {chunk[row, column]} is outside of the vocabulary, "
                f"0 to {vocab_size - 1}; set model.config.vocab_size to that of the tokenizer that made the file"
            )
        digest.update(chunk.data)
    return digest.hexdigest()


def unigram_entropy(samples: Samples, num_rows: int | None = None) -> float:
    """Entropy of the targets under their own frequencies, in nats per token.

    It is the least loss of a model that knows how common each token is and nothing of its context.

    Args:
        samples: The rows.
        num_rows: Only so many first ones count; None: all.
    """
    num_rows = samples.num_rows if num_rows is None else min(num_rows, samples.num_rows)
    counts = np.zeros(0, np.int64)
    chunk_rows = -(-_CHUNK_TOKENS // samples.seq_len)
    for start in range(0, num_rows, chunk_rows):
        indices = np.arange(start, min(start + chunk_rows, num_rows))
        found = np.bincount(samples.rows(indices)[:, 1:].ravel(), minlength=counts.size)
        found[: counts.size] += counts
        counts = found
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())
