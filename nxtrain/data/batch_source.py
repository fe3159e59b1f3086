"""Sources of a run's batches: rows of token files, or documents that are tokenized and packed on the fly."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from nxtrain.data.loader import Batch, BatchShare, Loader, Skips
from nxtrain.data.mixture import Mixture, progress
from nxtrain.data.samples import Samples
from nxtrain.data.stream_loader import (
    LaneOrder,
    LanePosition,
    Lanes,
    LaneSource,
    LocalLanes,
    StreamLoader,
    num_lanes,
    positions_of,
)
from nxtrain.data.workers import WorkerPolicy, Workers


@dataclass(frozen=True)
class BatchOrder:
    """Order of the batches of a rank, and the position from which a start continues.

    Args:
        share: This rank's share of each global batch.
        seed: Seed of the order.
        shuffle: True for a new random order in each epoch; False for the order of storage.
        doc_mask: Batches have attention masks between documents.
        origin: Position of step 0 in the order of rows.
        cursor: Position of each lane, from a checkpoint; empty to begin at the start of the data.
        skips: Batches that the run skips.
        workers: Settings of the processes that tokenize and pack documents; None for a thread of the rank.
    """

    share: BatchShare
    seed: int
    shuffle: bool
    doc_mask: bool = False
    origin: int = 0
    cursor: Mapping[str, Any] = field(default_factory=dict)
    skips: Skips = ()
    workers: WorkerPolicy | None = None


class Batches(Protocol):
    """Endless batches of one rank."""

    def prefetched(self, start_step: int, depth: int = 2) -> Generator[Batch, None, None]:
        """Iterate over the batches from step `start_step` (from 0) on; a thread reads up to `depth` batches ahead."""
        ...

    def cursor(self) -> dict[int, LanePosition]:
        """Position of each lane of this rank after the last consumed batch; empty if the step determines the batch."""
        ...

    def progress(self, step: int) -> dict[str, float]:
        """Data metrics for the record of a step, counted from 1."""
        ...


class BatchSource(Protocol):
    """Training data, from which each rank takes its batches."""

    @property
    def num_rows(self) -> int | None:
        """Number of rows in an epoch; None if the rows are endless."""
        ...

    def describe(self) -> str:
        """Amount of the data, as text."""
        ...

    def batches(self, order: BatchOrder) -> Batches:
        """Open the batches of a rank.

        Raises:
            CheckpointError: The cursor belongs to other data.
        """
        ...


@dataclass(frozen=True)
class TokenRows:
    """Training data of fixed rows, from token files or from pairs of answers.

    Args:
        samples: The rows.
        amount: Amount of the data as text; empty for the number of rows.
    """

    samples: Samples
    amount: str = ""

    @property
    def num_rows(self) -> int | None:
        """Rows in an epoch."""
        return self.samples.num_rows

    def describe(self) -> str:
        """Amount of the data, as text."""
        return self.amount or f"{self.samples.num_rows:,} rows"

    def batches(self, order: BatchOrder) -> Loader:
        """Open the batches of a rank."""
        return Loader(
            self.samples,
            order.share,
            seed=order.seed,
            shuffle=order.shuffle,
            origin=order.origin,
            doc_mask=order.doc_mask,
            skips=order.skips,
        )


@dataclass(frozen=True)
class Streams:
    """Training data of documents that are tokenized and packed on the fly.

    Args:
        source: Source of the lanes.
        sizes: Number of documents of each corpus.
        seq_len: Targets in a row.
        end_id: Input id after the last document of a row.
        mixture: Shares of several corpora; None for one corpus.
    """

    source: LaneSource
    sizes: tuple[int, ...]
    seq_len: int
    end_id: int
    mixture: Mixture | None = None

    @property
    def num_rows(self) -> int | None:
        """None, since the rows are endless."""
        return None

    def describe(self) -> str:
        """Amount of the data, as text."""
        return f"{sum(self.sizes):,} documents in rows"

    def batches(self, order: BatchOrder) -> StreamLoader:
        """Open the batches of a rank."""
        lanes = num_lanes(order.share.sizes.unit)
        num_corpora = 0
        if self.mixture is not None:
            num_corpora = len(self.sizes)
        lane_order = LaneOrder(lanes, order.seed, order.shuffle)
        open_lanes: Callable[[Mapping[int, LanePosition], int], Lanes]
        if order.workers is None:
            open_lanes = partial(LocalLanes, partial(self.source.opened(), lane_order))
        else:
            open_lanes = partial(Workers, self.source, lane_order, order.workers)
        return StreamLoader(
            open_lanes,
            lanes,
            order.share,
            end_id=self.end_id,
            doc_mask=order.doc_mask,
            positions=positions_of(order.cursor, lanes, num_corpora),
            progress=partial(self.progress, lanes),
            skips=order.skips,
        )

    def progress(self, lanes: int, positions: Mapping[int, LanePosition]) -> dict[str, float]:
        """Tokens and epochs of each corpus of a mixture. The epochs are those of the lowest lane in `positions`."""
        if self.mixture is None:
            return {}
        lane, position = min(positions.items())
        epochs = [(lane + first * lanes) / size for first, size in zip(position[1::2], self.sizes, strict=True)]
        return progress(self.mixture, position[0] * lanes, self.seq_len, epochs)
