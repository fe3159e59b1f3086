"""The loader: design contract of token files, independence from the layout, exact resume, errors that arrive."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.vocab import IGNORE_INDEX
from nxtrain.data import BatchShare, Loader
from nxtrain.data.loader import left_out, rows_left_out
from nxtrain.data.order import shuffled
from nxtrain.data.samples import TableSamples

NUM_ROWS, SEQ_LEN = 21, 6
TABLE = np.arange(NUM_ROWS * (SEQ_LEN + 1), dtype=np.uint16).reshape(NUM_ROWS, SEQ_LEN + 1)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(0, 40))
def test_steps_in_any_order_hold_the_rows_of_their_positions(steps: list[int], origin: int) -> None:
    """One loader permutes the positions of several steps at once; the order itself does so one step at a time."""
    loader = Loader(TableSamples(TABLE), BatchShare(8, 2, 1, 2), seed=3, shuffle=True, origin=origin)
    for step in steps:
        first = origin + step * 8 + 4
        rows = loader.batch(step).inputs[..., 0].ravel() // (SEQ_LEN + 1)
        np.testing.assert_array_equal(rows, shuffled(np.arange(first, first + 4), NUM_ROWS, 3))


def test_padded_pass_counts_every_row_once() -> None:
    samples = TableSamples(TABLE)
    counted, num_tokens = [], 0
    for dp_rank in (0, 1):
        loader = Loader(samples, BatchShare(8, 2, dp_rank, 2), seed=0, shuffle=False, past_end="pad")
        assert loader.steps_per_epoch == 3
        for step in range(3):
            batch = loader.batch(step)
            counted.append(batch.targets[batch.targets != IGNORE_INDEX])
            num_tokens += batch.num_tokens
    np.testing.assert_array_equal(np.sort(np.concatenate(counted)), TABLE[:, 1:].ravel())
    assert num_tokens == NUM_ROWS * SEQ_LEN


class FailingSamples(TableSamples):
    """A file that cannot be read beyond row 12."""

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """As the table, up to row 12."""
        if indices.max() >= 12:
            raise OSError("read error")
        return super().rows(indices)


def test_read_error_reaches_the_consumer_at_its_step() -> None:
    loader = Loader(FailingSamples(TABLE), BatchShare(4, 4), seed=0, shuffle=False)
    batches = loader.prefetched(0)
    for _ in range(3):
        next(batches)
    with pytest.raises(OSError, match="read error"):
        next(batches)


def test_closing_ends_the_thread() -> None:
    loader = Loader(TableSamples(TABLE), BatchShare(4, 4), seed=0, shuffle=False)
    batches = loader.prefetched(0)
    next(batches)
    assert any(thread.name.startswith("nxtrain-data") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("nxtrain-data") for thread in threading.enumerate())


def test_after_a_change_of_the_batch_the_order_goes_on_where_it_stood() -> None:
    """Ten steps of 4 rows, then steps of 6: as `origin`, the position at which steps of 6 would have begun."""
    narrow = Loader(TableSamples(TABLE), BatchShare(4, 2), seed=1, shuffle=True)
    wide = Loader(TableSamples(TABLE), BatchShare(6, 2), seed=1, shuffle=True, origin=10 * 4 - 10 * 6)

    def first_ids(loader: Loader, steps: range) -> list[int]:
        return [int(i) for step in steps for i in loader.batch(step).inputs[..., 0].ravel()]

    assert first_ids(wide, range(10, 14)) == first_ids(narrow, range(10, 16))


DRAWN = st.dictionaries(st.integers(0, 9), st.integers(0, 5), max_size=3)


@given(DRAWN, st.booleans())
def test_batches_are_left_out_behind_their_steps_and_nowhere_else(drawn: dict[int, int], shuffle: bool) -> None:
    """Brute force: the order without skips, with batches taken out one by one."""
    skips = tuple(sorted(drawn.items()))
    share = BatchShare(8, 2, 1, 2)
    whole = Loader(TableSamples(TABLE), share, seed=3, shuffle=shuffle)
    loader = Loader(TableSamples(TABLE), share, seed=3, shuffle=shuffle, skips=skips)
    order = iter(range(100))
    for step in range(12):
        for _ in range(drawn.get(step, 0)):
            next(order)
        np.testing.assert_array_equal(loader.batch(step).inputs, whole.batch(next(order)).inputs)
    assert left_out(skips, 2, 5) == sum(number for step, number in skips if step in range(2, 6))


RAMP = BatchSizes(16, ((2, 4), (5, 8)))


def ramped(dp: tuple[int, int] = (0, 1), micro: int = 1, **order: Any) -> Loader:
    return Loader(TableSamples(TABLE), BatchShare(16, micro, *dp, ramp=RAMP), seed=3, shuffle=True, **order)


def numbers(loader: Loader, step: int) -> list[int]:
    """Numbers of the rows of a rank's batch."""
    result: list[int] = (loader.batch(step).inputs[..., 0].ravel() // (SEQ_LEN + 1)).tolist()
    return result


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_a_ramp_gives_each_step_the_next_rows_of_the_one_order_on_any_number_of_ranks(dp: int, micro: int) -> None:
    loaders, position = [ramped((rank, dp), micro) for rank in range(dp)], 0
    for step in range(9):
        rows = [row for loader in loaders for row in numbers(loader, step)]
        assert rows == shuffled(np.arange(position, position + RAMP.at(step)), NUM_ROWS, 3).tolist()
        assert loaders[0].batch(step).inputs.shape == (RAMP.at(step) // (micro * dp), micro, SEQ_LEN)
        position += len(rows)


@given(DRAWN)
def test_batches_that_a_ramp_leaves_out_are_as_large_as_the_next(drawn: dict[int, int]) -> None:
    skips = tuple(sorted(drawn.items()))
    loader, position = ramped(skips=skips), 0
    for step in range(12):
        position += drawn.get(step, 0) * RAMP.at(step)
        assert numbers(loader, step) == shuffled(np.arange(position, position + RAMP.at(step)), NUM_ROWS, 3).tolist()
        position += RAMP.at(step)
    assert position == RAMP.before(12) + rows_left_out(skips, 0, 11, RAMP)
