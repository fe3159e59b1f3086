"""Parity of two runs: their losses, norms, rates and tokens within stated bounds.

In this way a run on Trainium is compared with the same run on a GPU or a CPU. Losses and norms are compared as means
over windows of steps, since single steps differ by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nxtrain.common.text import short
from nxtrain.tools.report.columns import Column
from nxtrain.tools.report.figures import difference
from nxtrain.tools.report.run import RecordedRun

WINDOWS = 20
"""Most windows of a comparison; each has the same number of records."""

FEWEST = 5
"""Fewest records that both runs must have."""

EXACT = 1e-6
"""Largest relative difference of numbers that do not depend on the device."""


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences of parity.

    Args:
        loss: Of the mean training loss in any window, and of every held-out loss.
        norm: Of the mean gradient norm in any window.
    """

    loss: float = 0.01
    norm: float = 0.10


@dataclass(frozen=True)
class Check:
    """Comparison of one quantity of two runs.

    Args:
        value: Largest relative difference; None without values to compare.
    """

    name: str
    passed: bool
    value: float | None
    bound: float
    text: str


@dataclass(frozen=True)
class Parity:
    """Comparison of a run with the first.

    Args:
        notes: Differences of the runs that may explain others.
    """

    first: str
    other: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every comparison is within its bound."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {**asdict(self), "passed": self.passed}


def compare(runs: Sequence[RecordedRun], bounds: Bounds) -> list[Parity]:
    """Compare each run with the first."""
    return [parity(runs[0], other, bounds) for other in runs[1:]]


def parity(first: RecordedRun, other: RecordedRun, bounds: Bounds) -> Parity:
    """Compare a run with another."""
    checks = [
        _checked(first, other, "training loss", "loss", bounds.loss, windows=True, required=True),
        _checked(first, other, "held-out loss", "val_loss", bounds.loss),
        _checked(first, other, "gradient norm", "grad_norm", bounds.norm, windows=True),
        _checked(first, other, "learning rate", "lr", EXACT),
        _checked(first, other, "tokens", "tokens", EXACT),
        _skipped(first, other),
    ]
    return Parity(first.name, other.name, tuple(check for check in checks if check), _notes(first, other))


def window_means(values: Column) -> Column:
    """Means of neighbouring values, in at most `WINDOWS` windows of equal size; the last window takes the remainder."""
    size = max(1, len(values) // WINDOWS)
    starts = np.arange(len(values) // size) * size
    ends = np.append(starts[1:], len(values))
    return np.add.reduceat(values, starts) / (ends - starts)


def _checked(
    first: RecordedRun,
    other: RecordedRun,
    name: str,
    key: str,
    bound: float,
    *,
    windows: bool = False,
    required: bool = False,
) -> Check | None:
    steps, a, b = difference(first, other, key)
    if not required and not len(steps):
        return None
    if required and len(steps) < FEWEST:
        text = f"the runs have {len(steps)} records of the same steps, and {FEWEST} are needed"
        return Check(name, False, None, bound, text)
    if windows:
        a, b = window_means(a), window_means(b)
    wholes = np.maximum(np.abs(a), np.abs(b))
    relative = np.abs(a - b) / np.where(wholes > 0, wholes, 1.0)
    worst = int(np.argmax(relative))
    kind = f"{len(a)} records"
    if windows:
        kind = f"means of {len(a)} windows"
    text = (
        f"at most {relative[worst]:.3g} apart in {kind} up to step {steps[-1]:,.0f}, where {bound:g} is allowed: "
        f"{short(float(a[worst]))} and {short(float(b[worst]))}"
    )
    return Check(name, bool(relative[worst] <= bound), float(relative[worst]), bound, text)


def _skipped(first: RecordedRun, other: RecordedRun) -> Check | None:
    a, b = set(first.columns.skipped), set(other.columns.skipped)
    if not a and not b:
        return None
    text = f"{len(a)} and {len(b)} steps, {len(a ^ b)} of them in one run only"
    return Check("steps that updated nothing", a == b, float(len(a ^ b)), 0.0, text)


_EXPLAINING = (
    *("run.seed", "model.preset", "model.hf", "train.seq_len", "train.global_batch", "train.steps", "optim.lr"),
    *("data.source", "data.path", "precision.params", "precision.update", "precision.reduce"),
)
"""Keys whose difference may explain other losses."""


def _notes(first: RecordedRun, other: RecordedRun) -> tuple[str, ...]:
    keys = [key for key in _EXPLAINING if key in first.config and key in other.config]
    differing = [key for key in keys if first.config[key] != other.config[key]]
    notes = [f"{key} differs: {first.value(key)} and {other.value(key)}" for key in differing]
    for run in (first, other):
        if run.columns.damaged or run.columns.torn:
            notes.append(f"{run.name}: some lines of its records are damaged, and are not compared")
    return tuple(notes)
