"""What a loader draws from: a table of token rows, checked before the first step."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nxtrain.data.files import Tokens
from nxtrain.errors import DataError

# Tokens handled at once where a whole table is read; 32 MiB as int64.
_CHUNK_TOKENS = 1 << 22


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
    """Rows of a 2-d array, usually one that lies in a file.

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
