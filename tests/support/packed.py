"""Drawn rows of documents that share a row, and the place of each document."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np

from nxtrain.data.loader import Batch, batch_of
from nxtrain.vocab import IGNORE_INDEX

SEQ_LEN, END = 64, 0


def drawn_row(rng: Random, vocab_size: int) -> list[int]:
    """S + 1 ids: documents of drawn lengths, each with its end; the last one may be cut, or padding may follow."""
    row: list[int] = []
    while len(row) <= SEQ_LEN:
        row += [rng.randrange(1, vocab_size) for _ in range(rng.choice((0, 1, 3, 10, 30)))] + [END]
        if rng.random() < 0.1:
            row += [IGNORE_INDEX] * (SEQ_LEN + 1)
    return row[: SEQ_LEN + 1]


def spans(row: list[int]) -> list[tuple[int, int]]:
    """First and last + 1 position of each document among the inputs of a row."""
    bounds = [0, *(place + 1 for place, token in enumerate(row[:SEQ_LEN]) if token in {END, IGNORE_INDEX}), SEQ_LEN]
    return [(begin, end) for begin, end in pairwise(bounds) if begin < end]


def drawn_batch(rng: Random, vocab_size: int, rows: int) -> tuple[list[list[int]], Batch]:
    found = [drawn_row(rng, vocab_size) for _ in range(rows)]
    return found, batch_of(np.array(found), rows, end_id=END, doc_mask=True)
