"""The order: every row once an epoch, in an order of its own for each seed and epoch, whoever asks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.data.order import shuffled


@given(num_rows=st.integers(1, 4000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
@settings(derandomize=True)
def test_every_epoch_holds_every_row_once(num_rows: int, seed: int, epoch: int) -> None:
    rows = shuffled(np.arange(num_rows) + epoch * num_rows, num_rows, seed)
    np.testing.assert_array_equal(np.sort(rows), np.arange(num_rows))


@given(num_rows=st.integers(1, 2**40), start=st.integers(0, 2**45), seed=st.integers(0, 9))
@settings(derandomize=True)
def test_a_position_means_the_same_row_in_any_company(num_rows: int, start: int, seed: int) -> None:
    together = shuffled(np.arange(start, start + 12), num_rows, seed)
    alone = [int(shuffled(np.array([start + i]), num_rows, seed)[0]) for i in range(12)]
    assert together.tolist() == alone
    assert together.min() >= 0
    assert together.max() < num_rows


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    positions = np.arange(1000)
    orders = [shuffled(positions + 1000 * epoch, 1000, seed) for seed in range(4) for epoch in range(4)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # Two independent permutations agree at about 1 place of 1000; 9 has a probability below 2e-6.
            assert np.count_nonzero(one == other) < 9


@pytest.mark.parametrize("num_rows", [5, 64, 97])
def test_every_row_is_as_likely_at_every_place(num_rows: int) -> None:
    # Reference: the chi-squared statistic of 4000 uniform permutations has mean (n-1)^2, deviation sqrt(2) (n-1).
    num_epochs = 4000
    rows = shuffled(np.arange(num_epochs * num_rows), num_rows, seed=7).reshape(num_epochs, num_rows)
    counts = np.stack([np.bincount(column, minlength=num_rows) for column in rows.T])
    expected = num_epochs / num_rows
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - (num_rows - 1) ** 2) < 5 * np.sqrt(2) * (num_rows - 1)
