"""What autograd keeps from a forward pass whose graph ends before its backward pass begins.

On a device that records, what is kept at the end of a graph is a result of it, and so takes memory as it stands: a view
and what it was cut from are two tensors, and a matrix that is kept transposed is copied. So what is kept here are the
tensors themselves and copies of views, which outlive what they were cut from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def no_views() -> Iterator[None]:
    """Let what is saved for backward in this context be no view of anything."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}  # what was saved, which keeps its number meanwhile, and in what form

    def pack(x: Tensor) -> Tensor:
        if id(x) not in kept:
            # Of what was computed nobody can say whether it is a view: for torch-xla every matrix product of more than
            # two dimensions ends in one. A copy costs nothing, since the original is gone when the graph ends. Nor is
            # it detached, which would make it a view again.
            given = x.is_leaf and not x._is_view()
            kept[id(x)] = x, (x if given else x.clone()).data
        return kept[id(x)][1]

    def unpack(x: Tensor) -> Tensor:
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    kept.clear()
