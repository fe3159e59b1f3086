"""Mixture of corpora: the corpus of each row of the endless order, by weights.

The rows of a period are assigned by the quota method. Before every row, the rows of each corpus differ by less than one
from the share of its weight. A period has as many rows as the weights have parts, and ends without any difference. The
corpus of a row and its number in that corpus are therefore two look-ups in tables, whose size no corpus changes.

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
"""Distance of the seeds of two corpora; the first one has the seed of the run."""


@dataclass(frozen=True)
class Mixture:
    """Corpora and their shares of the rows.

    Args:
        names: Paths of the corpora.
        shares: Rows of each corpus in a period; positive.
    """

    names: tuple[str, ...]
    shares: tuple[int, ...]

    @staticmethod
    def of(names: Sequence[str], weights: Sequence[float]) -> Mixture:
        """Mixture by weights; without weights, all corpora have equal shares."""
        return Mixture(tuple(names), row_shares(weights or [1.0] * len(names)))

    @property
    def period(self) -> int:
        """Rows after which the corpora repeat."""
        return sum(self.shares)

    @property
    def labels(self) -> tuple[str, ...]:
        """Short names of the corpora: their files' names without the ending, where these differ."""
        short = [Path(name).stem for name in self.names]
        return tuple(stem if short.count(stem) == 1 else name for stem, name in zip(short, self.names, strict=True))

    def seed(self, seed: int, corpus: int) -> int:
        """Seed of the order of a corpus."""
        return seed + corpus * _SEEDS

    def rows(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Corpus of each row, and the row's number in the corpus: (n,) positions to two (n,)."""
        corpora, numbers = self._tables
        period, row = np.divmod(positions, self.period)
        corpus = corpora[row].astype(np.int64)
        return corpus, numbers[row] + period * np.array(self.shares)[corpus]

    def counts(self, num_rows: int) -> list[int]:
        """Rows of each corpus among the first `num_rows`."""
        period, rest = divmod(num_rows, self.period)
        part = np.bincount(self._tables[0][:rest], minlength=len(self.shares)).tolist()
        return [period * share + begun for share, begun in zip(self.shares, part, strict=True)]

    @cached_property
    def _tables(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Corpus of each row of a period, and the row's number in the corpus."""
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
    """Rows of several tables of one length, mixed; a table's rows are numbered after those of earlier tables."""

    def __init__(self, mixture: Mixture, parts: tuple[Samples, ...]) -> None:
        self.mixture, self.parts = mixture, parts
        self.num_rows = sum(part.num_rows for part in parts)
        self.seq_len = parts[0].seq_len

    def ordered(self, positions: NDArray[np.int64], seed: int, *, shuffle: bool) -> NDArray[np.int64]:
        """Indices of the rows at positions of the endless order, in which each corpus has its own epochs."""
        corpora, numbers = self.mixture.rows(positions)
        indices = np.empty_like(positions)
        first = 0
        for corpus, part in enumerate(self.parts):
            mine = corpora == corpus
            indices[mine] = first + part.ordered(numbers[mine], self.mixture.seed(seed, corpus), shuffle=shuffle)
            first += part.num_rows
        return indices

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows at indices: (n,) to (n, S + 1)."""
        rows = np.empty((indices.size, self.seq_len + 1), np.int64)
        first = 0
        for part in self.parts:
            mine = (first <= indices) & (indices < first + part.num_rows)
            if mine.any():
                rows[mine] = part.rows(indices[mine] - first)
            first += part.num_rows
        return rows

    def progress(self, num_rows: int) -> dict[str, float]:
        """Tokens and epochs of each corpus after the first rows of the endless order."""
        counts = self.mixture.counts(num_rows)
        epochs = [count / part.num_rows for count, part in zip(counts, self.parts, strict=True)]
        return progress(self.mixture, num_rows, self.seq_len, epochs)


def progress(mixture: Mixture, num_rows: int, seq_len: int, epochs: Sequence[float]) -> dict[str, float]:
    """Values for the record of a step: `tokens/NAME` and `epochs/NAME` of each corpus."""
    values: dict[str, float] = {}
    for label, count, passed in zip(mixture.labels, mixture.counts(num_rows), epochs, strict=True):
        values[f"tokens/{label}"] = count * seq_len
        values[f"epochs/{label}"] = round(passed, 6)
    return values
