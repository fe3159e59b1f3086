"""How a float32 number lives between two updates: as it is, rounded, or rounded with the rest kept beside it.

An update opens its parameter and its running means, changes them in float32, and closes them. Which stores a rule of
`precision.update` uses is `nxtrain.optim.adamw`'s choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nxtrain.backends.rounding import RoundingKey


class Store(Protocol):
    """A tensor between updates."""

    def open(self) -> Tensor:
        """Its value in float32, which the caller changes and gives back."""
        ...

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        """Keep a new value.

        Args:
            wide: What `open` gave, changed; may be overwritten.
            step: () int32, hash of the step.
            skip: () bool, it was not changed, and what is kept must not be either; None: it was.
        """
        ...


@dataclass(frozen=True)
class InPlace:
    """Kept as float32, exactly."""

    value: Tensor

    def open(self) -> Tensor:
        return self.value

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        """Nothing: it was changed where it is."""


@dataclass(frozen=True)
class Copied:
    """Kept as float32 beside the narrow tensor that the model computes with."""

    value: Tensor
    master: Tensor

    def open(self) -> Tensor:
        return self.master

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        self.value.copy_(wide)


@dataclass(frozen=True)
class Nearest:
    """Rounded to the nearest number; changes of less than half the distance to the next one are lost."""

    value: Tensor

    def open(self) -> Tensor:
        return self.value.float()

    def close(self, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        self.value.copy_(wide)


@dataclass(frozen=True)
class Stochastic:
    """Rounded up or down at random, right on average.

    Source: Zamirai et al. 2020 (arXiv:2010.06192); Ozkara et al. 2025 (arXiv:2502.20566).

    Args:
        value: bfloat16, or float32 that holds values of bfloat16.
        key: What the random bits depend on.
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
    """Rounded to nearest, with what that lost kept in a second bfloat16: together 16 significant bits.

    Source: Zamirai et al. 2020 (arXiv:2010.06192), Kahan summation.

    Args:
        value: bfloat16, or float32 that holds values of bfloat16.
        lost: bfloat16.
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
        # The sum does not tell how it was divided, and has lost what is far below the last bit of the value.
        narrow = wide.to(torch.bfloat16)
        self.replace(self.value, narrow, skip)
        self.replace(self.lost, torch.sub(wide, self.value, out=narrow), skip)
