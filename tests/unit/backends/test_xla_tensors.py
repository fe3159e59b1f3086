"""Tensors of a device are found among all objects of a process, some of which other threads are freeing."""

from __future__ import annotations

import torch
from torch import Tensor

from nxtrain.backends.xla.graphs import tensors_on


class Freed(Tensor):
    """A tensor as torch leaves it between the release of its memory and the end of its Python object."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        raise RuntimeError("tensor does not have a device")


def test_tensors_of_the_device_are_found_beside_freed_ones() -> None:
    freed = torch.zeros(2).as_subclass(Freed)
    on, other = torch.zeros(2), torch.zeros(2, device="meta")
    result = tensors_on(torch.device("cpu"), [object(), freed, Tensor, on, "text", freed, other, freed])
    assert [id(item) for item in result] == [id(on)]
