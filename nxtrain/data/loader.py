"""Loader of batches: one rank's share of the global batch as a pure function of the step, with prefetch."""

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
from nxtrain.vocab import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one data parallel rank for one step.

    Attributes:
        inputs: (num_micro, micro_batch, S) int64 ids, S = seq_len.
        targets: The next ids, or `IGNORE_INDEX` at positions without a loss; same shape and type.
        num_tokens: Number of this rank's targets other than `IGNORE_INDEX`.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    num_tokens: int


@dataclass(frozen=True)
class BatchShare:
    """One data parallel rank's share of a global batch.

    Args:
        global_batch: Rows in a step, over all ranks.
        micro_batch: Rows in a micro-batch of one rank; with dp_size it divides global_batch.
        dp_rank, dp_size: This rank's place in the data parallel axis.
    """

    global_batch: int
    micro_batch: int
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        assert self.global_batch % (self.micro_batch * self.dp_size) == 0, self

    @property
    def num_rows(self) -> int:
        """Rows of this rank in a step."""
        return self.global_batch // self.dp_size


class Loader:
    """Assigns the endless order of rows to steps and ranks.

    Step k (from 0) covers positions [k * global_batch, (k + 1) * global_batch) of the order, counted from `origin`.
    Data parallel rank d takes the d-th contiguous block of them. After the last row the next epoch begins, if needed in
    the middle of a batch. Neither micro_batch nor dp_size changes the rows of a step, and there is no state to save.

    Args:
        samples: The rows.
        share: This rank's share of each global batch.
        seed: Seed of the order of every epoch.
        shuffle: True for a new random order in each epoch; False for the order of storage.
        origin: Position of step 0; other than 0 after a change of the global batch in the middle of a run.
        past_end: Rows after the last one: the next epoch (`wrap`), or rows without targets (`pad`). With `pad` an
            evaluation counts each row once, and every batch keeps its shape.
    """

    def __init__(
        self,
        samples: Samples,
        share: BatchShare,
        *,
        seed: int,
        shuffle: bool,
        origin: int = 0,
        past_end: Literal["wrap", "pad"] = "wrap",
    ) -> None:
        self._samples, self._share = samples, share
        self._seed, self._shuffle = seed, shuffle
        self._origin, self._past_end = origin, past_end

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that cover every row at least once."""
        return -(-self._samples.num_rows // self._share.global_batch)

    def batch(self, step: int) -> Batch:
        """Batch of this rank for a step, counted from 0."""
        share = self._share
        start = self._origin + step * share.global_batch + share.dp_rank * share.num_rows
        positions = np.arange(start, start + share.num_rows)
        num_rows = self._samples.num_rows
        indices = shuffled(positions, num_rows, self._seed) if self._shuffle else positions % num_rows
        rows = self._samples.rows(indices)
        targets = rows[:, 1:].copy()
        if self._past_end == "pad":
            targets[positions >= num_rows] = IGNORE_INDEX
        shape = (-1, share.micro_batch, self._samples.seq_len)
        num_tokens = int(np.count_nonzero(targets != IGNORE_INDEX))
        return Batch(rows[:, :-1].copy().reshape(shape), targets.reshape(shape), num_tokens)

    def prefetched(self, start_step: int, depth: int = 2) -> Generator[Batch, None, None]:
        """Endless batches from `start_step` on; a thread reads up to `depth` ahead of the consumer.

        A read error is raised to the consumer at the step of the failed batch. Closing the generator ends the thread.
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
