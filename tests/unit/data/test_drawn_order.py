"""Drawn batches and layouts read the rows of the contract, in the order of one rank, from any step on."""

from __future__ import annotations

from itertools import islice
from random import Random

import numpy as np
from numpy.typing import NDArray

from nxtrain.data import BatchShare, Loader
from nxtrain.data.samples import TableSamples
from tests.support.drawn import SEED

CASES = 200


def test_the_ranks_of_a_drawn_layout_read_what_one_rank_reads() -> None:
    for index in range(CASES):
        rng = Random(f"order/{SEED}/{index}")
        num_rows, seq_len, shuffle = rng.randint(1, 60), rng.randint(1, 9), rng.random() < 0.5
        dp, micro, accumulation = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 4)
        batch, seed, first = dp * micro * accumulation, rng.randrange(1 << 40), rng.randint(0, 50)
        table = np.arange(num_rows * (seq_len + 1), dtype=np.uint32).reshape(num_rows, seq_len + 1)

        def loader(
            rank: int = 0,
            size: int = 1,
            rows: int = batch,
            *,
            table: NDArray[np.uint32] = table,
            seed: int = seed,
            shuffle: bool = shuffle,
            batch: int = batch,
        ) -> Loader:
            return Loader(TableSamples(table), BatchShare(batch, rows, rank, size), seed=seed, shuffle=shuffle)

        said = f"seed {SEED}, case {index}"
        steps = range(first, first + 4)
        alone = [loader().batch(step) for step in steps]
        ranks = [islice(loader(rank, dp, micro).prefetched(first), 4) for rank in range(dp)]
        for step, whole, parts in zip(steps, alone, zip(*ranks, strict=True), strict=True):
            for part in parts:
                assert part.inputs.shape == part.targets.shape == (accumulation, micro, seq_len), said
                assert part.inputs.dtype == part.targets.dtype == np.int64
                assert part.num_tokens == part.targets.size
            inputs = np.concatenate([part.inputs.reshape(-1, seq_len) for part in parts])
            targets = np.concatenate([part.targets.reshape(-1, seq_len) for part in parts])
            np.testing.assert_array_equal(inputs, whole.inputs[0], said)
            np.testing.assert_array_equal(targets, whole.targets[0], said)
            np.testing.assert_array_equal(targets, inputs + 1, said)
            if not shuffle:
                rows = [(step * batch + i) % num_rows for i in range(batch)]
                np.testing.assert_array_equal(inputs, table[rows, :-1], said)
        read = np.concatenate([loader().batch(step).inputs[0, :, 0] for step in range(2 * num_rows // batch + 1)])
        for start in range(0, len(read) - num_rows + 1, num_rows):
            assert sorted(read[start : start + num_rows]) == sorted(table[:, 0]), said
