"""Loader of batches from lanes, streams of documents that are packed on the fly; its state is a position per lane."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import CheckpointError
from nxtrain.data.loader import Batch, BatchShare, Skips, batch_of, left_out

LanePosition = tuple[int, ...]
"""Position of a lane: index of a document in the lane's order, and a token or row index.

In a mixture: the number of rows that the lane has returned, and then these two numbers for each corpus.
"""
BEGIN: LanePosition = (0, 0)
MAX_LANES = 32


class Lane(Protocol):
    """Endless stream of rows, packed from the documents of one lane."""

    @property
    def position(self) -> LanePosition:
        """Position of the next row."""
        ...

    def row(self) -> NDArray[np.int32]:
        """Next row: (S + 1,) token ids with `PROMPT_BIT` and `END_BIT`, and `IGNORE_INDEX` after the last document."""
        ...


@dataclass(frozen=True)
class LaneOrder:
    """Number of lanes, seed, and whether documents are shuffled: the settings of the document order of all lanes."""

    lanes: int
    seed: int
    shuffle: bool


class LaneSource(Protocol):
    """Source of lanes that can be pickled and sent to another process, which opens the documents itself."""

    def opened(self, mark: Callable[[str], None] | None = None) -> Callable[[LaneOrder, int, LanePosition], Lane]:
        """Open the documents, and return a function that opens a lane.

        Args:
            mark: Called with the name of each document before it is read.
        """
        ...


LaneRows = dict[int, tuple[NDArray[np.int32], LanePosition]]
"""Rows (rows_per_lane, S + 1) of each lane for a step, and the lane's position after these rows, by lane."""


class Lanes(Protocol):
    """The lanes of one rank, which return rows step by step."""

    def rows(self, step: int) -> LaneRows:
        """Rows of each lane for the next step, and the lane positions after these rows."""
        ...

    def stop(self) -> None:
        """Interrupt a long call of `rows` in another thread."""
        ...

    def close(self) -> None:
        """Release the resources of the lanes; no thread may still call `rows`."""
        ...


class LocalLanes:
    """Lanes of a rank that are read in this process.

    Args:
        open_lane: Opens a lane by its number, at a position.
        positions: Position of each lane.
        rows_per_lane: Rows of a lane in each step.
    """

    def __init__(
        self, open_lane: Callable[[int, LanePosition], Lane], positions: Mapping[int, LanePosition], rows_per_lane: int
    ) -> None:
        self._lanes = {lane: open_lane(lane, position) for lane, position in positions.items()}
        self._rows_per_lane = rows_per_lane

    def rows(self, step: int) -> LaneRows:
        """Rows of each lane for the next step, and the lane positions after these rows."""
        del step  # the lanes know their positions
        by_lane: dict[int, tuple[NDArray[np.int32], LanePosition]] = {}
        for number, lane in self._lanes.items():
            rows = np.stack([lane.row() for _ in range(self._rows_per_lane)])
            by_lane[number] = rows, lane.position
        return by_lane

    def stop(self) -> None:
        """Do nothing, since a row takes little time."""

    def close(self) -> None:
        """Do nothing, since there are no resources to release."""


def num_lanes(global_batch: int) -> int:
    """Number of lanes: largest divisor of the global batch size up to `MAX_LANES`, for any number of ranks."""
    return max(lanes for lanes in range(1, MAX_LANES + 1) if global_batch % lanes == 0)


class StreamLoader:
    """Loader of batches from lanes, which assigns the rows of lanes to steps and ranks.

    Each lane supplies global_batch / lanes adjacent rows of every step. A data parallel rank tokenizes only the lanes
    of its rows. Neither micro_batch nor dp_size changes the rows of a step.

    Args:
        open_lanes: Opens lanes, given their positions and the number of rows of a lane in each step.
        lanes: Number of lanes; divides the global batch size of every step.
        share: This rank's share of the global batches.
        end_id: Input id after the last document of a row.
        doc_mask: Batches have attention masks between documents.
        positions: Position of every lane at the first batch; empty for the beginning of the corpus.
        progress: Function that computes data metrics from the positions of this rank's lanes.
        skips: Batches that the run skips, from the first batch on.
    """

    # 8 arguments: lanes, their share, their ends and their gaps
    def __init__(
        self,
        open_lanes: Callable[[Mapping[int, LanePosition], int], Lanes],
        lanes: int,
        share: BatchShare,
        *,
        end_id: int,
        doc_mask: bool = False,
        positions: Sequence[LanePosition] = (),
        progress: Callable[[Mapping[int, LanePosition]], dict[str, float]] = lambda positions: {},
        skips: Skips = (),
    ) -> None:
        sizes = share.sizes
        assert sizes.unit % lanes == 0, share
        self._open_lanes, self._share = open_lanes, share
        self._end_id, self._doc_mask = end_id, doc_mask
        self._progress, self._skips = progress, skips
        # The lanes give this many rows at a time, which makes a step of any size.
        self._sizes = sizes
        self._lanes = lanes
        self._rows_per_lane = sizes.unit // lanes
        mine = range(share.dp_rank * lanes // share.dp_size, -(-(share.dp_rank + 1) * lanes // share.dp_size))
        self._positions: dict[int, LanePosition] = dict.fromkeys(mine, BEGIN)
        if positions:
            self._positions = {lane: positions[lane] for lane in mine}

    def prefetched(self, start_step: int, depth: int = 2) -> Generator[Batch, None, None]:
        """Iterate endlessly over batches from the lanes' positions on; a thread tokenizes up to `depth` batches ahead.

        A read error is raised to the consumer at the step of the failed batch. Closing the generator ends the thread.

        Args:
            start_step: Step of the first batch; the positions are already those of this step.
        """
        lanes = self._open_lanes(self._positions, self._rows_per_lane)
        pool = ThreadPoolExecutor(1, thread_name_prefix="nxtrain-data")
        try:
            pending = deque(pool.submit(self._next, lanes, start_step + ahead) for ahead in range(depth))
            for step in count(start_step + depth):
                batch, positions = pending.popleft().result()
                pending.append(pool.submit(self._next, lanes, step))
                self._positions = positions
                yield batch
        finally:
            lanes.stop()
            pool.shutdown(cancel_futures=True)
            lanes.close()

    def cursor(self) -> dict[int, LanePosition]:
        """Position of each lane of this rank after the last consumed batch."""
        return dict(self._positions)

    def progress(self, step: int) -> dict[str, float]:
        """Data metrics for the record of the step whose batch was consumed last."""
        # The positions are those after the last batch.
        return {**self._progress(self._positions), **self._share.progress(step)}

    def _next(self, lanes: Lanes, step: int) -> tuple[Batch, dict[int, LanePosition]]:
        share, size = self._share, self._sizes.at(step)
        times = size // self._sizes.unit
        for _ in range(left_out(self._skips, step, step) * times):
            lanes.rows(step)
        parts = [lanes.rows(step) for _ in range(times)]
        by_lane = parts[-1]
        rows = np.concatenate([part[lane][0] for lane, part in product(by_lane, parts)], dtype=np.int64)
        num_rows = size // share.dp_size
        skipped = share.dp_rank * num_rows - min(by_lane) * (size // self._lanes)
        mine = rows[skipped : skipped + num_rows]
        seq_len = share.seq_len(step)
        batch = batch_of(mine, share.micro_batch, end_id=self._end_id, doc_mask=self._doc_mask, seq_len=seq_len)
        return batch, {number: position for number, (_, position) in by_lane.items()}


def merged(cursors: Sequence[Mapping[int, LanePosition]]) -> dict[str, Any]:
    """Merge the lane positions of all ranks into the cursor of a checkpoint."""
    positions: dict[int, LanePosition] = {}
    for cursor in cursors:
        positions.update(cursor)
    if not positions:
        return {}
    return {"places": [list(positions[lane]) for lane in range(len(positions))]}


def positions_of(cursor: Mapping[str, Any], lanes: int, corpora: int = 0) -> list[LanePosition]:
    """Lane positions in a checkpoint's cursor; empty if the checkpoint has none.

    Args:
        cursor: Cursor from the checkpoint.
        lanes: Number of lanes of this run.
        corpora: Number of corpora of the mixture; 0 without a mixture.
    """
    positions = [tuple(map(int, position)) for position in cursor.get("places", [])]
    length = len(BEGIN)
    if corpora:
        length = 1 + 2 * corpora
    if any(len(position) != length for position in positions):
        num_saved = 1
        if len(positions[0]) % 2:
            num_saved = len(positions[0]) // 2
        raise CheckpointError(
            f"the checkpoint's data is a mixture of {num_saved} corpora, and "
            f"this run reads {corpora or 1}; keep data.mixture, or start a new run from the weights"
        )
    if positions and len(positions) != lanes:
        raise CheckpointError(
            f"the checkpoint's data has {len(positions)} lanes, and train.global_batch here makes {lanes}; "
            "a lane is a stream of documents for some rows of every step. "
            "Keep train.global_batch, or start a new run from the weights"
        )
    return positions
