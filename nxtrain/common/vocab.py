"""Target tokens of a language model loss, and the vocabulary columns of a tensor parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.mesh import Axis

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_INDEX = -100
"""Target id that every loss ignores, as in torch's `cross_entropy`."""

PROBABILITY_UNITS = 1 << 24
"""Number of integer units that represent a target probability of 1; float32 represents each number of units exactly."""

PROMPT_BIT = 1 << 30
"""Bit flag on a token id in a data row: the token is part of a prompt, and not a target."""

END_BIT = 1 << 29
"""Bit flag on a token id in a data row: the token is the last of its document."""

DESIRABLE_BIT = 1 << 31
"""Bit flag on the last token id of an answer in a data row: the answer is labelled as desirable."""

ID_MASK = END_BIT - 1
"""Bit mask of the token id without flags."""


def true_targets(targets: Tensor) -> Tensor:
    """Target token ids without a teacher's soft targets: (B, S) unchanged, (B, 2R, S) to (B, S)."""
    if targets.dim() == 2:  # noqa: PLR2004 - rows and positions
        return targets
    return targets[:, 0]


@dataclass(frozen=True)
class VocabColumns:
    """Columns of the logits on one tensor parallel rank, which are a range of the vocabulary.

    Args:
        first: (2,) int64 on the device, first vocabulary entry of this rank, and number of its entries.
        padding: (V,) float32, 0 for a true column and -inf for a padded column; None without padding.
        comm: Collectives between the ranks.
        axis: Tensor parallel axis.
    """

    first: Tensor
    padding: Tensor | None
    comm: Collectives
    axis: Axis

    def locate(self, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the columns of target tokens in this rank's logits.

        Args:
            targets: (T,) token ids of the whole vocabulary, or `IGNORE_INDEX`.

        Returns:
            (T,) bool, targets that count; (T,) bool, targets among this rank's columns; (T, 1) local column of a target
            of this rank, else 0.
        """
        counted = targets != IGNORE_INDEX
        local = targets - self.first[0]
        here = counted & (local >= 0) & (local < self.first[1])
        return counted, here, local.masked_fill(~here, 0).unsqueeze(1)
