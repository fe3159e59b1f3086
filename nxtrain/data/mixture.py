"""Mixture of corpora: the corpus of each row in the endless order, by weights.

The rows of a period are assigned by the quota method. At every row, the number of rows of each corpus differs by less
than one from its share by weight. A period has as many rows as the sum of the integer weights, and ends with exact
shares. Two table look-ups give the corpus of a row and the row's index in the corpus. The table size does not depend on
the corpora.

Source: Balinski and Young 1975, "The quota method of apportionment".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nxtrain.config.bounds import row_shares
from nxtrain.data.samples import Samples

_SEEDS = 0x9E3779B97F4A7C15
"""Difference between the seeds of adjacent corpora; the first corpus has the seed of the run."""


@dataclass(frozen=True)
class Mixture:
    """Corpora of a mixture, and the share of the rows of each.

    Args:
        names: Paths of the corpora.
        shares: Positive number of rows of each corpus in a period.
    """

    names: tuple[str, ...]
    shares: tuple[int, ...]

    @staticmethod
    def of(names: Sequence[str], weights: Sequence[float]) -> Mixture:
        """Build a mixture from weights; without weights, all corpora have equal shares."""
        return Mixture(tuple(names), row_shares(weights or [1.0] * len(names)))

    @property
    def period(self) -> int:
        """Number of rows after which the order of corpora repeats."""
        return sum(self.shares)

    @property
    def labels(self) -> tuple[str, ...]:
        """Short unique names of the corpora: the file names without their ending, or the paths if these are equal."""
        short = [Path(name).stem for name in self.names]
        return tuple(stem if short.count(stem) == 1 else name for stem, name in zip(short, self.names, strict=True))

    def seed(self, seed: int, corpus: int) -> int:
        """Seed of the order of one corpus, derived from the seed of the run."""
        return seed + corpus * _SEEDS

    def rows(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Corpus of each row, and the row's index in the order of the corpus: (n,) positions to two (n,) arrays."""
        corpora, numbers = self._tables
        period, row = np.divmod(positions, self.period)
        corpus = corpora[row].astype(np.int64)
        return corpus, numbers[row] + period * np.array(self.shares)[corpus]

    def counts(self, num_rows: int) -> list[int]:
        """Number of rows of each corpus among the first `num_rows` rows."""
        period, rest = divmod(num_rows, self.period)
        part = np.bincount(self._tables[0][:rest], minlength=len(self.shares)).tolist()
        return [period * share + begun for share, begun in zip(self.shares, part, strict=True)]

    @cached_property
    def _tables(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Corpus of each row of a period, and the row's index in the corpus."""
        period, counts = self.period, [0] * len(self.shares)
        assigned = []
        for row in range(1, period + 1):
            # Of the corpora that stay below the next integer above their share, the one that needs its next row first.
            # Fractions of integers up to 100,000 in [0, 1] are different floats, so that no rounding decides.
            _, chosen = min(
                ((count + 1) / share, corpus)
                for corpus, (count, share) in enumerate(zip(counts, self.shares, strict=True))
                if count * period < share * row
            )
            assigned.append((chosen, counts[chosen]))
            counts[chosen] += 1
        table = np.array(assigned, np.int64)
        return table[:, 0].astype(np.int32), table[:, 1]


class MixedSamples(Samples):
    """Rows of several corpora with equal row length, mixed by weights; row indices count through all corpora."""

    def __init__(self, mixture: Mixture, parts: tuple[Samples, ...]) -> None:
        self.mixture, self.parts = mixture, parts
        self.num_rows = sum(part.num_rows for part in parts)
        self.seq_len = parts[0].seq_len

    def ordered(self, positions: NDArray[np.int64], seed: int, *, shuffle: bool) -> NDArray[np.int64]:
        """Row indices at positions of the endless order; each corpus has its own epochs."""
        corpora, numbers = self.mixture.rows(positions)
        indices = np.empty_like(positions)
        first = 0
        for corpus, part in enumerate(self.parts):
            mine = corpora == corpus
            indices[mine] = first + part.ordered(numbers[mine], self.mixture.seed(seed, corpus), shuffle=shuffle)
            first += part.num_rows
        return indices

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows with the given indices: (n,) to (n, S + 1)."""
        rows = np.empty((indices.size, self.seq_len + 1), np.int64)
        first = 0
        for part in self.parts:
            mine = (first <= indices) & (indices < first + part.num_rows)
            if mine.any():
                rows[mine] = part.rows(indices[mine] - first)
            first += part.num_rows
        return rows

    def progress(self, num_rows: int) -> dict[str, float]:
        """Tokens and epochs of each corpus after the first `num_rows` rows of the endless order."""
        counts = self.mixture.counts(num_rows)
        epochs = [count / part.num_rows for count, part in zip(counts, self.parts, strict=True)]
        return progress(self.mixture, num_rows, self.seq_len, epochs)


def progress(mixture: Mixture, num_rows: int, seq_len: int, epochs: Sequence[float]) -> dict[str, float]:
    """Metrics of a mixture for the record of a step: `tokens/NAME` and `epochs/NAME` of each corpus."""
    values: dict[str, float] = {}
    for label, count, passed in zip(mixture.labels, mixture.counts(num_rows), epochs, strict=True):
        values[f"tokens/{label}"] = count * seq_len
        values[f"epochs/{label}"] = round(passed, 6)
    return values
