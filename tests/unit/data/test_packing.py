"""Packing of documents: no document that fits is cut, every token is once in a row, and little room is wasted."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from nxtrain.data.packing import best_fit, best_fit_rows

LENGTHS = st.lists(st.integers(0, 60), max_size=80)


@given(LENGTHS, st.integers(1, 20))
@example([], 4)
@example([0, 0], 4)
@example([4, 8, 9], 4)
def test_every_token_is_in_one_row_and_a_document_that_fits_is_whole(lengths: list[int], capacity: int) -> None:
    packed = best_fit(np.array(lengths, np.int64), capacity)
    tokens = [
        (document, token)
        for document, start, length in zip(packed.documents, packed.starts, packed.lengths, strict=True)
        for token in range(start, start + length)
    ]
    assert sorted(tokens) == [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    pieces = np.bincount(packed.documents, minlength=len(lengths))
    assert all(pieces[document] == -(-length // capacity) for document, length in enumerate(lengths))
    filled = np.bincount(packed.rows, weights=packed.lengths)
    assert filled.size == packed.num_rows
    assert not packed.num_rows or 0 < filled.min() <= filled.max() <= capacity
    assert (np.diff(packed.rows) >= 0).all()


@given(LENGTHS, st.integers(1, 20))
def test_counts_of_lengths_give_the_number_of_rows(lengths: list[int], capacity: int) -> None:
    rests = np.array(lengths, np.int64) % capacity
    whole = int(np.sum(np.array(lengths, np.int64) // capacity))
    counts = np.bincount(rests, minlength=capacity)
    assert whole + best_fit_rows(counts, capacity) == best_fit(np.array(lengths, np.int64), capacity).num_rows


@given(LENGTHS, st.integers(1, 20))
def test_each_piece_goes_to_the_fullest_row_with_room(lengths: list[int], capacity: int) -> None:
    """The definition of best-fit decreasing, by search over all rows."""
    free: list[int] = []
    for rest in sorted((length % capacity for length in lengths if length % capacity), reverse=True):
        fitting = [row for row, room in enumerate(free) if room >= rest]
        if not fitting:
            free.append(capacity)
            fitting = [len(free) - 1]
        free[min(fitting, key=lambda row: free[row])] -= rest
    packed = best_fit(np.array(lengths, np.int64), capacity)
    filled = np.bincount(packed.rows, weights=packed.lengths, minlength=packed.num_rows).astype(int)
    whole = sum(length // capacity for length in lengths)
    assert sorted(capacity - filled[whole:]) == sorted(free)


def test_time_grows_as_that_of_a_sort() -> None:
    random = np.random.default_rng(0)
    seconds = []
    for number in (10_000, 80_000):
        lengths = random.integers(1, 4000, number)
        start = time.process_time()
        best_fit(lengths, 2049)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 8 * 4 * seconds[0], "a search over all rows would take 64 times as long"
