"""Division of a sequence between context parallel ranks, as pure data.

Under causal attention, a later position costs more work. One piece from each end of the sequence, or every cp-th
position, gives each rank an equal share of the work.

Source: Brandon et al. 2023 (arXiv:2311.09431) for stripes; Grattafiori et al. 2024 (arXiv:2407.21783) section 3.3.2 for
a piece from each end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

CutLayout = Literal["contiguous", "zigzag", "striped"]
ContextMethod = Literal["gather", "ring"]


@dataclass(frozen=True)
class SequenceCut:
    """Division of sequences of one length between context parallel ranks.

    Args:
        seq_len: Tokens of a sequence.
        size: Context parallel degree; divides `seq_len`.
        layout: Positions of a rank. `contiguous`: one piece; `zigzag`: one piece from each end; `striped`: every
            `size`-th
            position.
    """

    seq_len: int
    size: int
    layout: CutLayout

    @staticmethod
    def of(seq_len: int, size: int, layout: Literal["auto"] | CutLayout) -> SequenceCut:
        """Division by the configured layout; `auto` selects zigzag if its pieces have equal lengths, else stripes."""
        if layout != "auto":
            return SequenceCut(seq_len, size, layout)
        if seq_len % (2 * size) == 0:
            return SequenceCut(seq_len, size, "zigzag")
        return SequenceCut(seq_len, size, "striped")

    def positions(self, rank: int) -> tuple[range, ...]:
        """Ranges of sequence positions of a context parallel rank, in ascending order."""
        if self.layout == "striped":
            return (range(rank, self.seq_len, self.size),)
        if self.layout == "contiguous":
            length = self.seq_len // self.size
            return (range(rank * length, (rank + 1) * length),)
        length = self.seq_len // (2 * self.size)
        return tuple(range(piece * length, (piece + 1) * length) for piece in (rank, 2 * self.size - 1 - rank))

    @property
    def rank_of_last(self) -> int:
        """Rank that has the last position of the sequence, whose query may attend to all keys."""
        if self.layout == "zigzag":
            return 0
        return self.size - 1

    def listed(self, rank: int) -> tuple[int, ...]:
        """All sequence positions of a context parallel rank, as a tuple."""
        return _listed(self, rank)

    def pairs(self, rank: int, window: int | None = None) -> int:
        """Number of (query, key) pairs of a rank's queries in causal attention, optionally within a sliding window."""
        limit = self.seq_len
        if window is not None:
            limit = min(window, limit)
        pairs = 0
        for positions in self.positions(rank):
            growing = range(positions.start, min(positions.stop, limit), positions.step)
            if growing:
                pairs += len(growing) * (growing[0] + growing[-1] + 2) // 2
            pairs += (len(positions) - len(growing)) * limit
        return pairs


@lru_cache(maxsize=64)
def _listed(cut: SequenceCut, rank: int) -> tuple[int, ...]:
    return tuple(chain(*cut.positions(rank)))
