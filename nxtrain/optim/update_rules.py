"""Storage of parameters and moments between two updates: exact float32, rounded, or rounded with the error kept.

An update opens its parameter and its moments, changes them in float32, and closes them. `nxtrain.optim.adamw` selects
the storage for each value of `precision.update`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nxtrain.common.kernels import RoundingKey


class ParamStorage(Protocol):
    """Interface of the storage of a parameter or moment between updates."""

    def open(self) -> Tensor:
        """Current value in float32, which the caller changes and passes to `close`."""
        ...

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        """Store a new value.

        Args:
            wide: Result of `open`, changed by the update; may be overwritten.
            step: Hash of the step for stochastic rounding, () int32.
            skip: () bool; if True, `wide` is unchanged, and the stored value must not change. None never skips.
        """
        ...


@dataclass(frozen=True)
class InPlace:
    """Storage of a parameter or moment as float32, updated in place."""

    value: Tensor

    def open(self) -> Tensor:
        return self.value

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        """Do nothing, since `wide` is the stored tensor itself."""


@dataclass(frozen=True)
class Copied:
    """Storage of a parameter as a float32 master copy, in addition to the tensor that the model uses."""

    value: Tensor
    master: Tensor

    def open(self) -> Tensor:
        return self.master

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        self.value.copy_(wide)


@dataclass(frozen=True)
class Nearest:
    """Storage of a moment rounded to nearest; a change of less than half the distance to the next number is lost."""

    value: Tensor

    def open(self) -> Tensor:
        return self.value.float()

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        self.value.copy_(wide)


@dataclass(frozen=True)
class Stochastic:
    """Storage of a parameter or moment by stochastic rounding, which rounds up or down so that the mean is exact.

    Source: Zamirai et al. 2020 (arXiv:2010.06192); Ozkara et al. 2025 (arXiv:2502.20566).

    Args:
        value: Stored tensor in bfloat16, or in float32 with bfloat16 values.
        key: Key of the random bits.
        round_: `Kernels.stochastic_round`.
    """

    value: Tensor
    key: RoundingKey
    round_: Callable[[Tensor, Tensor, RoundingKey, Tensor], None]

    def open(self) -> Tensor:
        return self.value.float()

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        self.round_(wide, self.value, self.key, step)


@dataclass(frozen=True)
class Compensated:
    """Storage of a parameter with Kahan compensation: a bfloat16 value, and its rounding error in a second bfloat16.

    Together they have 16 significant bits. Source: Zamirai et al. 2020 (arXiv:2010.06192), Kahan summation.

    Args:
        value: Stored tensor in bfloat16, or in float32 with bfloat16 values.
        lost: Rounding error, bfloat16.
        replace: `Kernels.replace`.
    """

    value: Tensor
    lost: Tensor
    replace: Callable[[Tensor, Tensor, Tensor], None]

    def open(self) -> Tensor:
        return self.value.float() + self.lost

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        if skip is None:
            self.value.copy_(wide.to(torch.bfloat16))
            self.lost.copy_(wide.sub_(self.value))
            return
        # After a skip, `wide` cannot restore the two stored numbers: their sum has lost bits far below its last one.
        narrow = wide.to(torch.bfloat16)
        self.replace(self.value, narrow, skip)
        self.replace(self.lost, torch.sub(wide, self.value, out=narrow), skip)


class Elsewhere:
    """Storage of a parameter on another device than the update, which works on a local copy.

    Args:
        value: The stored tensor.
        device: Device of the update.
        store: Storage of the local copy.
    """

    def __init__(self, value: Tensor, device: torch.device, store: Callable[[Tensor], ParamStorage]) -> None:
        self._value = value
        self._device = device
        self._store = store
        self._open: tuple[Tensor, ParamStorage] | None = None

    def open(self) -> Tensor:
        here = self._value.to(self._device, copy=True)
        self._open = here, self._store(here)
        return self._open[1].open()

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        """Store a new value in the copy, and copy it back to the other device."""
        assert self._open is not None
        here, store = self._open
        store.close(wide, step, skip)
        self._value.copy_(here)
        self._open = None
