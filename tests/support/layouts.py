"""Layouts of drawn runs, and covering arrays of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Any

FULLY_SHARDED = ("grad_op", "full", "hybrid")


@dataclass(frozen=True)
class Degrees:
    """A layout, as the factors that a covering array pairs."""

    tp: int = 1
    pp: int = 1
    virtual_pp: int = 1
    dp: int = 1
    shard: str = "none"
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    cp: int = 1
    cp_layout: str = "auto"
    cp_method: str = "auto"
    ep: int = 1

    def __str__(self) -> str:
        kinds = [self.shard, self.schedule, "sp" if self.sequence_parallel else ""]
        if self.cp > 1:
            kinds += [f"cp{self.cp}", self.cp_layout, self.cp_method]
        if self.ep > 1:
            kinds.append(f"ep{self.ep}")
        degrees = f"tp{self.tp}-pp{self.pp}x{self.virtual_pp}-dp{self.dp}"
        return "-".join((degrees, *(kind for kind in kinds if kind not in ("none", "1f1b", ""))))

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def divides(self) -> int:
        """Number that divides the tokens of a sequence."""
        pieces = self.cp * (2 if self.cp_layout == "zigzag" else 1)
        return math.lcm(pieces, self.cp * self.tp) if self.sequence_parallel else pieces

    @property
    def factors(self) -> tuple[object, ...]:
        """Values that a covering array pairs."""
        *dense, cp, cp_layout, cp_method, ep = astuple(self)
        experts = (ep,) if ep > 1 else ()
        context = (cp, cp_layout, cp_method) if cp > 1 else ()
        return (*dense, *experts, *context)


ONE = Degrees()


def covering_array(
    seed: int, number: int, fits: Callable[[Degrees], bool] = lambda _: True, *, cp: bool = False, ep: bool = False
) -> list[Degrees]:
    """Layouts in which every two values of two factors that can meet do so, and drawn ones up to a number.

    Args:
        cp: Layouts with context parallelism, in place of those without.
        ep: Layouts with expert parallelism, in place of those without; with and without context parallelism.
    """
    rng = Random(f"layouts/{seed}")
    given = context_layouts() if cp else all_layouts()
    layouts = [degrees for degrees in (expert_layouts() if ep else given) if fits(degrees)]
    rng.shuffle(layouts)
    pairs = {degrees: frozenset(combinations(enumerate(degrees.factors), 2)) for degrees in layouts}
    missing = set().union(*pairs.values())
    results = []
    while missing:
        best = max(layouts, key=lambda degrees: len(pairs[degrees] & missing) / (2 + degrees.world))
        results.append(best)
        missing -= pairs[best]
    small = [degrees for degrees in layouts if degrees.world <= 4]
    return results + rng.choices(small, k=number - len(results))


def ramped_layouts(seed: int) -> list[Degrees]:
    """Layouts of up to four ranks of both kinds, with context parallelism and without, in turn."""
    pairs = zip(covering_array(seed, 64), covering_array(seed, 48, cp=True), strict=False)
    return [degrees for pair in pairs for degrees in pair if degrees.world <= 4]


@cache
def all_layouts() -> tuple[Degrees, ...]:
    """Every layout of up to eight ranks; factors that do not fit each other are left out."""
    factors = (
        (1, 2, 3, 4),
        (1, 2, 3, 4),
        (1, 2, 3),
        (1, 2, 3, 4),
        ("none", "zero1", *FULLY_SHARDED),
        ("1f1b", "zero_bubble"),
        (False, True),
    )
    return tuple(degrees for degrees in (Degrees(*values) for values in product(*factors)) if _is_layout(degrees))


@cache
def context_layouts() -> tuple[Degrees, ...]:
    """Every layout of up to eight ranks with context parallelism."""
    ways: list[dict[str, Any]] = [
        {"cp": cp, "cp_layout": layout, "cp_method": method}
        for cp in (2, 3, 4)
        for layout in ("contiguous", "zigzag", "striped")
        for method in ("gather", "ring")
    ]
    layouts = (replace(degrees, **way) for degrees in all_layouts() for way in ways if degrees.world * way["cp"] <= 8)
    return tuple(layouts)


@cache
def expert_layouts() -> tuple[Degrees, ...]:
    """Every layout of up to eight ranks with expert parallelism."""
    return tuple(
        replace(degrees, ep=ep)
        for degrees in (*all_layouts(), *context_layouts())
        for ep in (2, 3, 4, 6, 8)
        if degrees.dp * degrees.cp % ep == 0
    )


def _is_layout(degrees: Degrees) -> bool:
    if degrees.schedule == "zero_bubble":
        splits = degrees.pp > 1 and degrees.virtual_pp == 1 and degrees.shard not in FULLY_SHARDED
    else:
        splits = True
    turns = degrees.virtual_pp == 1 or degrees.pp > 1
    return degrees.world <= 8 and splits and turns and (degrees.tp > 1 or not degrees.sequence_parallel)


def is_for_xla(degrees: Degrees) -> bool:
    """Layouts of up to four XLA devices, whose pipelines pair their stages and cut optimizer state alone."""
    return (
        degrees.world <= 4
        and degrees.pp in (1, 2, 4)
        and degrees.virtual_pp <= 2
        and degrees.shard not in FULLY_SHARDED
        and degrees.schedule == "1f1b"
        and degrees.cp_method != "ring"
    )
