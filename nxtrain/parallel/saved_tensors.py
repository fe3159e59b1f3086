"""Tensors saved for backward when a compiled graph ends between the forward and the backward pass.

On a lazy device, tensors saved at the end of a graph are outputs of the graph, each with its own memory. A view and its
base are two tensors, and a transposed matrix is a copy. So this module saves parameters and inputs themselves, and
copies of computed tensors and views. The copies do not keep their bases alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def save_copies_of_views() -> Iterator[None]:
    """Within this context, autograd saves copies of computed tensors and views, and all other tensors themselves."""
    # By id: the saved tensor, kept alive so that its id stays unique, and the form in which it is saved.
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(x: Tensor) -> Tensor:
        if id(x) not in kept:
            # A computed tensor may be a hidden view: torch-xla ends every matrix product of more than two dimensions
            # with a view. A copy costs nothing, since the original is freed when the graph ends. `detach` instead of
            # `data` would make a view again.
            saved = x
            if not x.is_leaf or x._is_view():
                saved = x.clone()
            kept[id(x)] = x, saved.data
        return kept[id(x)][1]

    def unpack(x: Tensor) -> Tensor:
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    kept.clear()
