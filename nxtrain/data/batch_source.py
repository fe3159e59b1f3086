"""Sources of a run's batches: rows of token files, or documents that become rows while they are consumed."""

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
    """Order of the batches of a rank, and the position at which a start continues.

    Args:
        shuffle: True for a new random order in each epoch; False for the order of storage.
        doc_mask: Batches have masks between documents.
        origin: Position of step 0 in the order of rows.
        cursor: Position of each lane, from a checkpoint; empty: the begin.
        workers: Processes that tokenize and pack documents; None: a thread of the rank.
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
    """Endless batches of a rank."""

    def prefetched(self, start_step: int, depth: int = 2) -> Generator[Batch, None, None]:
        """Batches from a step on, counted from 0; a thread reads up to `depth` ahead of the consumer."""
        ...

    def cursor(self) -> dict[int, LanePosition]:
        """Position of each lane of this rank after the last consumed batch; empty if the step is sufficient."""
        ...

    def progress(self, step: int) -> dict[str, float]:
        """Values for the record of a step, counted from 1."""
        ...


class BatchSource(Protocol):
    """Data to train on, from which each rank takes its batches."""

    @property
    def num_rows(self) -> int | None:
        """Rows in an epoch; None if the rows have no end."""
        ...

    def describe(self) -> str:
        """Amount of the data in words."""
        ...

    def batches(self, order: BatchOrder) -> Batches:
        """Open the batches of a rank.

        Raises:
            CheckpointError: The cursor belongs to other data.
        """
        ...


@dataclass(frozen=True)
class TokenRows:
    """Rows of token files, or of pairs.

    Args:
        samples: The rows.
        amount: Amount of the data in words; empty: the number of rows.
    """

    samples: Samples
    amount: str = ""

    @property
    def num_rows(self) -> int | None:
        """Rows in an epoch."""
        return self.samples.num_rows

    def describe(self) -> str:
        """Amount of the data in words."""
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
    """Documents that are tokenized and packed while they are consumed.

    Args:
        sizes: Number of documents of each corpus.
        end_id: Input after the last document of a row.
        mixture: Shares of several corpora; None for one.
    """

    source: LaneSource
    sizes: tuple[int, ...]
    seq_len: int
    end_id: int
    mixture: Mixture | None = None

    @property
    def num_rows(self) -> int | None:
        """None: the rows have no end."""
        return None

    def describe(self) -> str:
        """Amount of the data in words."""
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
        """Tokens and epochs of each corpus of a mixture; the epochs are those of the lowest lane in `positions`."""
        if self.mixture is None:
            return {}
        lane, position = min(positions.items())
        epochs = [(lane + first * lanes) / size for first, size in zip(position[1::2], self.sizes, strict=True)]
        return progress(self.mixture, position[0] * lanes, self.seq_len, epochs)
