"""Drawn rows of documents that share a row, and the place of each document."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.vocab import END_BIT, IGNORE_INDEX
from nxtrain.data.loader import Batch, batch_of

SEQ_LEN, END = 64, 0


def drawn_row(rng: Random, vocab_size: int) -> list[int]:
    """S + 1 marked ids: documents of drawn lengths, each with its end; the last may be cut, or padding may follow.

    The id of the end is also a word of the documents.
    """
    row: list[int] = []
    while len(row) <= SEQ_LEN:
        words = [rng.choice((END, rng.randrange(vocab_size))) for _ in range(rng.choice((0, 1, 3, 10, 30)))]
        row += [*words, END | END_BIT]
        if rng.random() < 0.1:
            row += [IGNORE_INDEX] * (SEQ_LEN + 1)
    return row[: SEQ_LEN + 1]


def spans(row: list[int]) -> list[tuple[int, int]]:
    """First and last + 1 position of each document among the inputs of a row."""
    is_last = [token == IGNORE_INDEX or token & END_BIT != 0 for token in row[:SEQ_LEN]]
    bounds = [0, *(position + 1 for position in range(SEQ_LEN) if is_last[position]), SEQ_LEN]
    return [(begin, end) for begin, end in pairwise(bounds) if begin < end]


def drawn_batch(rng: Random, vocab_size: int, rows: int) -> tuple[list[list[int]], Batch]:
    found = [drawn_row(rng, vocab_size) for _ in range(rows)]
    return found, batch_of(np.array(found), rows, end_id=END, doc_mask=True)


def rows_of_stream(stream: NDArray[Any], seq_len: int) -> NDArray[Any]:
    """Rows of a stream of tokens, each of which begins with the last token of the row before: (T,) to (n, S + 1)."""
    num_rows = max(0, stream.size - 1) // seq_len
    return np.array([stream[row * seq_len : (row + 1) * seq_len + 1] for row in range(num_rows)]).reshape(
        num_rows, seq_len + 1
    )
