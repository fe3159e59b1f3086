"""Batches as a pure function of the step: one rank's share of the global batch, with the next ones read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nxtrain.data.order import shuffled
from nxtrain.data.samples import Samples
from nxtrain.family import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """What one data parallel rank trains on in one step.

    Attributes:
        inputs: (num_micro, micro_batch, S) int64 ids, S = seq_len.
        targets: The ids that follow, or `IGNORE_INDEX` where nothing is to be predicted; same shape and type.
        num_tokens: Targets of this rank that count.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    num_tokens: int


class Loader:
    """Deals the endless order of rows out to steps and ranks.

    Step k (from 0) covers positions [k * global_batch, (k + 1) * global_batch) of the order, counted from `origin`;
    data parallel rank d takes the d-th contiguous block of them. Behind the last row the next epoch begins, in the
    middle of a batch if need be.
    Neither micro_batch nor dp_size changes which rows a step trains on, and there is no state to save.

    Args:
        samples: The rows.
        seed: Draws the order of every epoch.
        shuffle: Whether rows come in an order of their own each epoch, or as they are stored.
        global_batch: Rows in a step, over all ranks.
        micro_batch: Rows in a micro-batch of one rank; with dp_size it divides global_batch.
        dp_rank, dp_size: This rank's place in the data parallel axis.
        origin: Position of step 0, which is not 0 after a change of the global batch in the middle of a run.
        past_end: What follows the last row: the next epoch (`wrap`), or rows without targets (`pad`), so that an
            evaluation counts each row once while every batch keeps its shape.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        seed: int,
        shuffle: bool,
        global_batch: int,
        micro_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        origin: int = 0,
        past_end: Literal["wrap", "pad"] = "wrap",
    ) -> None:
        assert global_batch % (micro_batch * dp_size) == 0, (global_batch, micro_batch, dp_size)
        self._samples = samples
        self._seed = seed
        self._shuffle = shuffle
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._dp_rank = dp_rank
        self._rank_batch = global_batch // dp_size
        self._origin = origin
        self._past_end = past_end

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see every row at least once."""
        return -(-self._samples.num_rows // self._global_batch)

    def batch(self, step: int) -> Batch:
        """This rank's part of a step, counted from 0."""
        start = self._origin + step * self._global_batch + self._dp_rank * self._rank_batch
        positions = np.arange(start, start + self._rank_batch)
        num_rows = self._samples.num_rows
        indices = shuffled(positions, num_rows, self._seed) if self._shuffle else positions % num_rows
        rows = self._samples.rows(indices)
        targets = rows[:, 1:].copy()
        if self._past_end == "pad":
            targets[positions >= num_rows] = IGNORE_INDEX
        shape = (-1, self._micro_batch, self._samples.seq_len)
        num_tokens = int(np.count_nonzero(targets != IGNORE_INDEX))
        return Batch(rows[:, :-1].copy().reshape(shape), targets.reshape(shape), num_tokens)

    def prefetched(self, start_step: int, depth: int = 2) -> Generator[Batch, None, None]:
        """Batches from `start_step` on, without end; a thread reads up to `depth` ahead of the consumer.

        An error while reading reaches the consumer at the step that it belongs to. Closing the generator ends the
        thread.
        """
        pool = ThreadPoolExecutor(1, thread_name_prefix="nxtrain-data")
        try:
            pending = deque(pool.submit(self.batch, start_step + ahead) for ahead in range(depth))
            step = start_step + depth
            while True:
                batch = pending.popleft().result()
                pending.append(pool.submit(self.batch, step))
                step += 1
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)
