"""Sources of token rows for the loader, checked before the first step and again when rows are read."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.common.vocab import END_BIT
from nxtrain.data.order import shuffled
from nxtrain.data.storage import DataFile, Tokens, read_exactly, unreadable

if TYPE_CHECKING:
    from nxtrain.config.finetune_schema import FinetuneConfig

# Tokens per chunk when a whole table is read; 32 MiB as int64.
_CHUNK_TOKENS = 1 << 22

_PROBED_ROWS = 64

_HEADER_BYTES = 1 << 17
"""Maximum size in bytes of the header of a .npy file; a longer header is refused."""

_CHANGED = "the file was changed, or this machine has another copy; keep it unchanged, and start again"


@dataclass(frozen=True)
class AnswerRows:
    """Row format of a preference objective.

    Args:
        pairs_per_row: Half of the maximum number of answers in a row.
        labelled: Answers have labels; otherwise, each two answers are a pair.
    """

    pairs_per_row: int
    labelled: bool = False

    @staticmethod
    def of(config: FinetuneConfig) -> AnswerRows | None:
        """Row format of the configured objective; None if the objective does not compare answers."""
        if not config.compares:
            return None
        return AnswerRows(config.pairs_per_row, labelled=config.objective == "kto")


class Samples(ABC):
    """Token rows of equal length, by index.

    Attributes:
        num_rows: Number of rows in an epoch.
        seq_len: S, number of targets in a row.
        pairs_per_row: K, half of the maximum number of answers in a row; 0 for rows of other documents.
        labelled: The rows have answers with labels.
    """

    num_rows: int
    seq_len: int
    pairs_per_row: int = 0
    labelled: bool = False

    @abstractmethod
    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows with the given indices: (n,) to (n, S + 1). Inputs are [:, :-1], targets [:, 1:]."""

    def ordered(self, positions: NDArray[np.int64], seed: int, *, shuffle: bool) -> NDArray[np.int64]:
        """Row indices at positions of the endless training order: (n,) to (n,)."""
        if shuffle:
            return shuffled(positions, self.num_rows, seed)
        return positions % self.num_rows

    def progress(self, num_rows: int) -> dict[str, float]:
        """Metrics for the record of a step after `num_rows` rows of the endless order; empty without a mixture."""
        del num_rows
        return {}

    def with_teacher(self, targets: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Mix the targets of some rows, (..., S), with a teacher's tokens for distillation, if the run has a teacher.

        Returns:
            The targets unchanged, or (..., 2R, S): R token ids of each target, then R probabilities in
            `PROBABILITY_UNITS`.
        """
        del indices
        return targets

    def reference(self, indices: NDArray[np.int64], *, swapped: bool = False) -> NDArray[np.float32] | None:
        """Log-probabilities of the answers in rows by the reference model, (n,) to (n, 2K); None if not precomputed.

        Args:
            swapped: Return them for the rows from `swap_answers`.
        """
        del indices, swapped
        return None


class TableSamples(Samples):
    """Rows of a table in memory: (num_rows, S + 1) token ids of any integer type.

    Args:
        answers: Row format of a preference objective; None for other rows.
        has_reference: Return zeros as the reference log-probabilities of answers.
        teacher_k: Number of teacher tokens for each target; 0 without a teacher.
    """

    def __init__(
        self, table: Tokens, *, answers: AnswerRows | None = None, has_reference: bool = False, teacher_k: int = 0
    ) -> None:
        self._table, self._has_reference = table, has_reference
        self._teacher_k = teacher_k
        self.num_rows, self.seq_len = len(table), int(table.shape[1]) - 1
        if answers is not None:
            self.pairs_per_row, self.labelled = answers.pairs_per_row, answers.labelled

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows with the given indices: (n,) to (n, S + 1)."""
        return self._table[indices].astype(np.int64)

    def with_teacher(self, targets: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Repeat the targets as placeholders for a teacher's tokens; without a teacher, return them unchanged."""
        del indices
        if not self._teacher_k:
            return targets
        return np.expand_dims(targets, -2).repeat(2 * (1 + self._teacher_k), axis=-2)

    def reference(self, indices: NDArray[np.int64], *, swapped: bool = False) -> NDArray[np.float32] | None:
        """Zeros as the reference log-probabilities of the answers, (n,) to (n, 2K); None without a reference."""
        if not self._has_reference:
            return None
        return np.zeros((indices.size, 2 * self.pairs_per_row), np.float32)


class FileSamples(Samples):
    """Rows of a .npy file of token ids, each checked when it is read.

    If the open file is modified, a sample of its rows must still match. A file that is replaced or deleted stays open,
    and the old content is read.

    Args:
        file: The open file: (num_rows, S + 1) ids.
        vocab_size: Size of the vocabulary; every id must be below it.
        expected: Result of `probe` when the file was checked; None before the first check.

    Raises:
        DataError: The file is not a table of rows of this length, is cut short, or differs from the checked ids.
    """

    def __init__(self, file: DataFile, *, seq_len: int, vocab_size: int, expected: str | None = None) -> None:
        self._file, self._expected = file, expected
        self._vocab_size, self.seq_len = vocab_size, seq_len
        self._dtype, shape, self._start = header(file)
        if len(shape) != 2 or not np.issubdtype(self._dtype, np.integer):  # noqa: PLR2004 - a table has 2 dimensions
            raise DataError(
                f"{file.name} holds {self._dtype} of shape {shape}; rows of integer ids are (rows, seq_len + 1)"
            )
        self.num_rows, width = shape
        if width != seq_len + 1:
            way_out = f"set train.seq_len={width - 1}" if width > 1 else "save longer rows"
            raise DataError(
                f"{file.name} has rows of {width} ids, but train.seq_len={seq_len} reads {seq_len + 1}; {way_out}"
            )
        if not self.num_rows:
            raise DataError(f"{file.name} has no rows")
        if file.num_bytes < self._start + self.num_rows * width * self._dtype.itemsize:
            size = f"{file.num_bytes:,} bytes"
            raise DataError(f"{file.name} is cut short: it has {size}, and its header names {self.num_rows:,} rows")
        self._version = file.version()
        if expected is not None:
            self._compare()

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows with the given indices: (n,) to (n, S + 1).

        Raises:
            DataError: An id is outside of the vocabulary, or the file has changed; names the file and the row.
            StorageError: The file cannot be read; names the file and the row.
        """
        version = self._file.version()
        if version != self._version:
            self._compare()
            self._version = version
        return self._rows(indices)

    @property
    def name(self) -> str:
        """Name of the file, for messages."""
        return str(self._file.name)

    def probe(self) -> str:
        """Digest of the number of rows and of a sample of the rows, which differs for most other tables."""
        digest = hashlib.blake2b(f"{self.num_rows}".encode(), digest_size=16)
        sampled = np.linspace(0, self.num_rows - 1, min(self.num_rows, _PROBED_ROWS)).astype(np.int64)
        digest.update(self._rows(sampled).tobytes())
        return digest.hexdigest()

    def digest(self) -> str:
        """Digest of the whole content; every row is checked."""
        width = self.seq_len + 1
        digest = hashlib.blake2b(f"{self._dtype} {(self.num_rows, width)}".encode())
        chunk_rows = -(-_CHUNK_TOKENS // width)
        for begin in range(0, self.num_rows, chunk_rows):
            stored = np.empty((min(chunk_rows, self.num_rows - begin), width), self._dtype)
            self._read(begin, stored)
            self._check_ids(stored, np.arange(begin, begin + len(stored)))
            digest.update(stored.data)
        return digest.hexdigest()

    def _rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        stored = np.empty((indices.size, self.seq_len + 1), self._dtype)
        row_bytes = stored.shape[1] * stored.itemsize
        for row in indices.tolist():
            self._file.ahead(read_exactly, self._file, row_bytes, self._start + row * row_bytes)
        for number, row in enumerate(indices.tolist()):
            self._read(row, stored[number : number + 1])
        self._check_ids(stored, indices)
        return stored.astype(np.int64)

    def _read(self, row: int, stored: NDArray[Any]) -> None:
        """Fill an array with the rows from row `row` on."""
        content = stored.view(np.uint8).reshape(-1).data
        start = self._start + row * stored.shape[1] * stored.itemsize
        done = 0
        while done < len(content):
            try:
                length = self._file.read(content[done:], start + done)
            except OSError as error:
                raise unreadable(f"{self._file.name}, row {row},", error) from error
            if not length:
                raise DataError(f"{self._file.name}, row {row}, is no longer there: the file is shorter: {_CHANGED}")
            done += length

    def _check_ids(self, ids: NDArray[Any], rows: NDArray[np.int64]) -> None:
        """Raise a DataError for an id outside of the vocabulary; the message names the first such row."""
        if not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size):
            return
        number, column = np.argwhere((ids < 0) | (ids >= self._vocab_size))[0]
        why = "; set model.config.vocab_size, or take the teacher, of the tokenizer that made the file"
        if self._expected is not None:
            why = f", though all were inside when the run began: {_CHANGED}"
        raise DataError(
            f"{self._file.name}, row {rows[number]}, column {column}: id {ids[number, column]} is outside of "
            f"the vocabulary, 0 to {self._vocab_size - 1}{why}"
        )

    def _compare(self) -> None:
        if self._expected is not None and self.probe() != self._expected:
            raise DataError(f"{self._file.name} does not hold what was checked when the run began: {_CHANGED}")


class EndedSamples(Samples):
    """Rows of a token file from another program, in which only the id `end_id` marks the end of a document."""

    def __init__(self, samples: Samples, end_id: int) -> None:
        self._samples, self._end_id = samples, end_id
        self.num_rows, self.seq_len = samples.num_rows, samples.seq_len

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows with the given indices, (n,) to (n, S + 1), with `END_BIT` at the end of each document."""
        rows = self._samples.rows(indices)
        return np.where(rows == self._end_id, rows | END_BIT, rows)


def header(opened: DataFile) -> tuple[np.dtype[np.integer[Any]], tuple[int, ...], int]:
    """Read the header of an open .npy file: dtype and shape of the ids, and offset of the first id.

    Raises:
        DataError: The file is not a .npy array of numbers, or is stored column by column.
    """
    path = opened.name
    try:
        file = io.BytesIO(read_exactly(opened, min(opened.num_bytes, _HEADER_BYTES), 0))
    except OSError as error:
        raise unreadable(f"{path}", error) from error
    if file.getvalue().startswith(b"PK"):
        raise DataError(f"{path} is an archive of arrays; save the one that holds the ids with numpy.save")
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except Exception as error:  # numpy reads headers with Python's parsers, and passes their errors on
        raise DataError(f"{path} is not a .npy array of numbers, or is cut short: {error}") from error
    if dtype.hasobject or any(type(size) is not int or size < 0 for size in shape):
        raise DataError(f"{path} is not a .npy array of numbers: it holds {dtype} of shape {shape}")
    if is_fortran and len(shape) > 1:
        raise DataError(
            f"{path} is stored column by column; save its rows: numpy.save(path, numpy.ascontiguousarray(ids))"
        )
    return dtype, shape, file.tell()
