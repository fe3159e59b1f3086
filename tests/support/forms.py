"""Tensors of one value in every form that a caller may have them in, and a watch over what must stay as it is.

A form is how a tensor lies in memory: whole, a view of something larger, one of several views of a split, a copy of
one row by a stride of 0. Functions that take a view for a copy write into what belongs to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """Form of a tensor in memory.

    Args:
        name: In messages.
        fits: Whether a tensor of this shape may have it.
        base: Shape of what is stored.
        view: The tensor, seen in that.
    """

    name: str
    fits: Callable[[Shape], bool]
    base: Callable[[Shape], Shape]
    view: Callable[[Tensor, Shape], Tensor]


def _longer(shape: Shape, dim: int, by: int) -> Shape:
    dim %= len(shape)
    return (*shape[:dim], shape[dim] + by, *shape[dim + 1 :])


def _split(x: Tensor, shape: Shape) -> Tensor:
    part: Tensor = x.split((1, shape[-1], 2), dim=-1)[1]
    return part


def _any(shape: Shape) -> bool:
    return len(shape) > 0


WHOLE = Form("whole", lambda _: True, lambda s: s, lambda x, _: x)
ROWS = Form("rows", _any, lambda s: _longer(s, 0, 3), lambda x, s: x.narrow(0, 2, s[0]))
COLUMNS = Form("columns", _any, lambda s: _longer(s, -1, 3), lambda x, s: x.narrow(-1, 1, s[-1]))
SPLIT = Form("split", _any, lambda s: _longer(s, -1, 3), _split)
HEADS = Form(
    "split-heads",
    lambda s: len(s) > 2,
    lambda s: _longer(s, -2, 2),
    lambda x, s: x.split((1, s[-2], 1), dim=-2)[1],
)
STRIDED = Form("strided", _any, lambda s: (*s[:-1], 2 * s[-1]), lambda x, _: x[..., ::2])
TRANSPOSED = Form("transposed", lambda s: len(s) > 1, lambda s: (s[1], s[0], *s[2:]), lambda x, _: x.transpose(0, 1))
TURNED = Form("turned", lambda s: len(s) > 1, lambda s: (s[-1], *s[:-1]), lambda x, s: x.permute(*range(1, len(s)), 0))
EXPANDED = Form("expanded", _any, lambda s: (1, *s[1:]), lambda x, s: x.expand(s))
ONE = Form("one", _any, lambda s: (1,) * len(s), lambda x, s: x.expand(s))
VIEWED = Form("viewed", lambda _: True, lambda s: s, lambda x, s: x.view(s))

FORMS = (WHOLE, ROWS, COLUMNS, SPLIT, HEADS, STRIDED, TRANSPOSED, TURNED, EXPANDED, ONE, VIEWED)
OVERLAPPING = (EXPANDED, ONE)
"""Forms whose entries share memory."""

CONTIGUOUS = (WHOLE, ROWS, VIEWED)
"""Forms of memory without gaps."""


def draw_form(rng: Random, shape: Shape, among: tuple[Form, ...] = FORMS) -> Form:
    """A form that fits."""
    return rng.choice([form for form in among if form.fits(shape)])


@dataclass(frozen=True)
class Placed:
    """A tensor and what it is a view of.

    Args:
        x: What an operation is given.
        base: What is stored: as `x`, or more; a leaf.
        form: How the one lies in the other.
    """

    x: Tensor
    base: Tensor
    form: Form

    def within(self, base: Tensor) -> Tensor:
        """View of other contents of the base, as the tensor shows them."""
        return self.form.view(base, tuple(self.x.shape))


def place(
    form: Form,
    shape: Shape,
    values: Callable[[Shape], Tensor],
    *,
    requires_grad: bool = False,
    device: torch.device | str = "cpu",
) -> Placed:
    """A tensor of a shape in a form.

    Args:
        form: How it lies in memory.
        shape: Of the tensor.
        values: A tensor of the shape of the base.
        requires_grad: Of the base, and so of the view.
        device: Where it lies; the view is taken there.
    """
    base = values(form.base(shape)).to(device).requires_grad_(requires_grad)
    x = form.view(base, shape)
    assert x.shape == shape, (form.name, x.shape, shape)
    return Placed(x, base, form)


@dataclass(frozen=True)
class _Kept:
    placed: Placed
    values: Tensor
    version: int
    is_written: bool


class Watch:
    """Tensors that an operation must leave as they are: values, those around them in memory, and version counters."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def add(self, name: str, placed: Placed, *, is_written: bool = False) -> None:
        """Remember a tensor; of one that the operation may write, only what lies beside it."""
        values = placed.base.detach().cpu().clone()
        self._kept[name] = _Kept(placed, values, placed.x._version, is_written)

    def changes(self) -> Iterator[str]:
        """Changes since then, in words."""
        for name, kept in self._kept.items():
            placed, now = kept.placed, kept.placed.base.detach().cpu().clone()
            if kept.is_written:
                placed.within(now).copy_(placed.within(kept.values))
                if not same_bits(now, kept.values):
                    yield f"what lies beside {name} has other values"
            elif not same_bits(now, kept.values):
                inside = not same_bits(placed.within(now), placed.within(kept.values))
                yield f"{name} has other values" if inside else f"what lies beside {name} has other values"
            elif placed.x._version != kept.version:
                yield f"{name} was written: its version is {placed.x._version} and was {kept.version}"

    def check(self, after: str) -> None:
        """Fail if anything was changed."""
        found = list(self.changes())
        assert not found, f"after {after}: {'; '.join(found)}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True for two tensors of a host that are equal bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in (a, b))
    return one.equal(other)
