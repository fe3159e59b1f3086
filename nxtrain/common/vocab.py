"""Targets of a language model, and the columns of the logits that a tensor parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.mesh import Axis

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_INDEX = -100
"""Target that every loss ignores; torch's own choice in `cross_entropy`."""

PROBABILITY_UNITS = 1 << 24
"""Units in the probability 1 of a target; float32 represents every number of units exactly."""

PROMPT_BIT = 1 << 30
"""Mark on an id in a row of data: the token is part of a prompt, and not a target."""

END_BIT = 1 << 29
"""Mark on an id in a row of data: the token is the last of its document."""

DESIRABLE_BIT = 1 << 31
"""Mark on the last id of an answer in a row of data: the answer is labelled as desirable."""

ID_MASK = END_BIT - 1
"""Bits of a marked id without its marks."""


def true_targets(targets: Tensor) -> Tensor:
    """True tokens of targets, (B, S) to the same, or (B, 2R, S) with a teacher to (B, S)."""
    if targets.dim() == 2:  # noqa: PLR2004 - rows and positions
        return targets
    return targets[:, 0]


@dataclass(frozen=True)
class VocabColumns:
    """Columns of the logits that a tensor parallel rank holds.

    Args:
        first: (2,) int64 on the device, first vocabulary row of this rank, and its number of rows.
        padding: (V,) float32, 0 for a true column and -inf for a padded one; None without padding.
    """

    first: Tensor
    padding: Tensor | None
    comm: Collectives
    axis: Axis

    def locate(self, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns of the targets in this rank's logits.

        Args:
            targets: (T,) over the whole vocabulary, or `IGNORE_INDEX`.

        Returns:
            (T,) bool, targets that count; (T,) bool, targets among this rank's columns; (T, 1) column of a target here,
            else 0.
        """
        counted = targets != IGNORE_INDEX
        local = targets - self.first[0]
        here = counted & (local >= 0) & (local < self.first[1])
        return counted, here, local.masked_fill(~here, 0).unsqueeze(1)
