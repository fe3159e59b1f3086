"""Storage of float32 numbers between two updates: exact, rounded, or rounded with the rounding error kept.

An update opens its parameter and its running means, changes them in float32, and closes them. `nxtrain.optim.adamw`
chooses the storage for each rule of `precision.update`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nxtrain.common.kernels import RoundingKey


class ParamStorage(Protocol):
    """A tensor between updates."""

    def open(self) -> Tensor:
        """Value in float32, which the caller changes and passes to `close`."""
        ...

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        """Store a new value.

        Args:
            wide: Result of `open`, changed by the update; may be overwritten.
            step: () int32, hash of the step.
            skip: () bool, `wide` is unchanged, and the stored value must not change either; None: never.
        """
        ...


@dataclass(frozen=True)
class InPlace:
    """Storage as float32, exact."""

    value: Tensor

    def open(self) -> Tensor:
        return self.value

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        """Do nothing: `wide` is the stored tensor itself."""


@dataclass(frozen=True)
class Copied:
    """Storage as a float32 master copy, in addition to the narrow tensor that the model computes with."""

    value: Tensor
    master: Tensor

    def open(self) -> Tensor:
        return self.master

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        self.value.copy_(wide)


@dataclass(frozen=True)
class Nearest:
    """Storage rounded to nearest; a change of less than half the distance to the next number is lost."""

    value: Tensor

    def open(self) -> Tensor:
        return self.value.float()

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        self.value.copy_(wide)


@dataclass(frozen=True)
class Stochastic:
    """Storage rounded up or down at random, with the exact value as the mean.

    Source: Zamirai et al. 2020 (arXiv:2010.06192); Ozkara et al. 2025 (arXiv:2502.20566).

    Args:
        value: bfloat16, or float32 that holds values of bfloat16.
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
    """Storage rounded to nearest, with the rounding error in a second bfloat16: together 16 significant bits.

    Source: Zamirai et al. 2020 (arXiv:2010.06192), Kahan summation.

    Args:
        value: bfloat16, or float32 that holds values of bfloat16.
        lost: bfloat16, the rounding error.
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
    """Storage on another device than the update, which works on a copy in a storage of its own.

    Args:
        value: The stored tensor.
        device: Device of the update.
        store: Storage of the copy.
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
        """Store a new value, and bring the copy back."""
        assert self._open is not None
        here, store = self._open
        store.close(wide, step, skip)
        self._value.copy_(here)
        self._open = None
