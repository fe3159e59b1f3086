"""Packing of documents into rows of equal length: cut from one concatenated stream, or whole by best fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class RowPacking:
    """Assignment of document pieces to rows, ordered by row and by position in the row.

    Attributes:
        documents: (p,) index of each piece's document.
        starts: (p,) offset of the piece's first token in its document.
        lengths: (p,) number of tokens of the piece.
        rows: (p,) row of the piece, ascending.
        num_rows: Number of rows.
    """

    documents: Counts
    starts: Counts
    lengths: Counts
    rows: Counts
    num_rows: int

    @property
    def begins(self) -> Counts:
        """(p,) start position of each piece in its row; the pieces of a row are adjacent."""
        before = np.cumsum(self.lengths) - self.lengths
        first = np.searchsorted(self.rows, self.rows)
        begins: Counts = before - before[first]
        return begins


def best_fit(lengths: Counts, capacity: int, *, most_pieces: int = 0) -> RowPacking:
    """Pack documents by best-fit decreasing: longest first, each into the fullest row with enough space.

    A document that fits a row is never cut. A longer document is cut into whole rows and a rest, which is packed as a
    document. The same lengths give the same rows. The time is that of a sort, plus one search in a bit mask of
    `capacity` bits for each piece.

    Reference: Ding et al. 2024, Fewer Truncations Improve Language Modeling, section 3.

    Args:
        lengths: (n,) tokens of each document, 0 or more.
        capacity: Tokens of a row.
        most_pieces: Maximum number of pieces in a row; 0 for no limit.
    """
    num_whole, rest = np.divmod(np.asarray(lengths, np.int64), capacity)
    documents = np.repeat(np.arange(num_whole.size), num_whole)
    whole = documents.size
    first = np.cumsum(num_whole) - num_whole
    starts = (np.arange(whole) - first[documents]) * capacity

    order = np.argsort(-rest, kind="stable")[: np.count_nonzero(rest)]
    rows, num_rows = _fit(rest[order].tolist(), capacity, most_pieces)
    by_row = np.argsort(rows, kind="stable")
    rests = order[by_row]
    return RowPacking(
        documents=np.concatenate([documents, rests]),
        starts=np.concatenate([starts, num_whole[rests] * capacity]),
        lengths=np.concatenate([np.full(whole, capacity), rest[rests]]),
        rows=np.concatenate([np.arange(whole), whole + rows[by_row]]),
        num_rows=whole + num_rows,
    )


def _fit(lengths: list[int], capacity: int, most_pieces: int) -> tuple[Counts, int]:
    """Assign pieces with descending lengths from 1 to `capacity` to rows; return the rows and the number of rows."""
    rows = np.empty(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity)]  # rows by the tokens that they still can hold
    mask, num_rows = 0, 0  # bit r is set if a row has room for r tokens
    held: list[int] = []  # pieces of each row
    for piece, length in enumerate(lengths):
        fitting = mask >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                mask ^= 1 << room
        else:
            room, row = capacity, num_rows
            num_rows += 1
            held.append(0)
        rows[piece] = row
        held[row] += 1
        left = room - length
        if left and held[row] != most_pieces:
            with_room[left].append(row)
            mask |= 1 << left
    return rows, num_rows


def best_fit_rows(counts: Counts, capacity: int) -> int:
    """Number of rows that `best_fit` fills, from a histogram of lengths, in a time independent of the number of pieces.

    Args:
        counts: (capacity,) number of pieces of each length below `capacity`. Whole rows are not counted.
        capacity: Tokens of a row.
    """
    with_room = [0] * capacity
    mask, num_rows = 0, 0
    for length in range(capacity - 1, 0, -1):
        waiting = int(counts[length])
        while waiting:
            fitting = mask >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                num_chosen = with_room[room]
            else:
                room, num_chosen = capacity, waiting
            # The fullest row with room for one piece stays the fullest until it has room for no further one.
            pieces_per_row = room // length
            full, part = divmod(waiting, pieces_per_row)
            if full >= num_chosen:
                full, part = num_chosen, 0
            waiting -= full * pieces_per_row + part
            if room == capacity:
                num_rows += full + (part > 0)
            else:
                with_room[room] -= full + (part > 0)
                if not with_room[room]:
                    mask ^= 1 << room
            for left, number in ((room - pieces_per_row * length, full), (room - part * length, int(part > 0))):
                if left and number:
                    with_room[left] += number
                    mask |= 1 << left
    return num_rows
