"""Check that imported weights are finite: a single NaN makes every loss NaN."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from nxtrain.common.errors import InputError

_SHOWN = 10


class Finiteness:
    """Collects the tensors with values that are not finite during an import.

    Args:
        source: Origin of the tensors, for the message.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._found: dict[str, tuple[int, int]] = {}  # NaN and infinite values, by tensor

    def note(self, name: str, part: Tensor) -> None:
        """Check some values of a tensor, and record those that are not finite."""
        # The extremes of a part are finite exactly if all its values are, and cost no memory.
        if not part.numel() or torch.stack(torch.aminmax(part)).isfinite().all():
            return
        nans, infinite = self._found.get(name, (0, 0))
        self._found[name] = (nans + int(part.isnan().sum()), infinite + int(part.isinf().sum()))

    def check(self) -> None:
        """Refuse the import if any recorded value is not finite.

        Raises:
            InputError: Some values are not finite; names the tensors, and the number of values in each.
        """
        if not self._found:
            return
        shown = [f"{name} ({_counted(*counts)})" for name, counts in list(self._found.items())[:_SHOWN]]
        more = ""
        if len(self._found) > _SHOWN:
            more = f" and {len(self._found) - _SHOWN:,} more"
        tensors = "1 tensor has"
        if len(self._found) > 1:
            tensors = f"{len(self._found):,} tensors have"
        raise InputError(
            f"{self._source}: {tensors} values that are not finite: {', '.join(shown)}{more}. With them every loss is "
            "NaN; fetch the folder again, compare its files with the source's checksums, or export the model anew"
        )


def _counted(nans: int, infinite: int) -> str:
    return " and ".join(f"{count:,} {kind}" for count, kind in ((nans, "NaN"), (infinite, "infinite")) if count)
