"""Tensors that autograd saves from a forward pass whose graph ends before its backward pass begins.

On a lazy device, tensors saved at the end of a graph are results of the graph, each with memory of its own. A view and
its base are two tensors, and a transposed matrix is a copy. So this module saves parameters and inputs themselves, and
copies of computed tensors and views, which do not keep their bases alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def save_copies_of_views() -> Iterator[None]:
    """Save no views for backward in this context: copies of computed tensors and views, other tensors themselves."""
    # By id: the saved tensor, kept alive so that its id stays unique, and the form in which it is saved.
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(x: Tensor) -> Tensor:
        if id(x) not in kept:
            # A computed tensor may be a view unnoticed: for torch-xla every matrix product of more than two dimensions
            # ends in one. A copy costs nothing, since the original is freed when the graph ends. `detach` instead of
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
