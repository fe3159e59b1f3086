"""Comparison of runs: parity of a run with the first within given bounds, and scaling over nodes.

A run on Trainium can so be compared with the same run on a GPU or a CPU. Losses and norms are compared as means over
windows of steps, since single steps differ by rounding. HLAT's recipe exceeds an efficiency of 0.90 at 64 nodes (Fan et
al. 2024, arXiv:2404.10630).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from nxtrain.common.errors import ConfigError
from nxtrain.common.text import short
from nxtrain.plan.hardware import find_machine
from nxtrain.tools.report.columns import Column
from nxtrain.tools.report.facts import typical
from nxtrain.tools.report.figures import difference
from nxtrain.tools.report.run import RecordedRun

WINDOWS = 20  # maximum number of windows of equal size
FEWEST = 5  # minimum number of steps that both runs recorded

EXACT = 1e-6  # bound on the relative difference of numbers that do not depend on the device

EXPLAINING = (
    *("run.seed", "model.preset", "model.hf", "train.seq_len", "train.global_batch", "train.steps", "optim.lr"),
    *("data.source", "data.path", "precision.params", "precision.update", "precision.reduce"),
)
"""Configuration keys whose difference may explain different losses of two runs."""


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences between two runs that count as parity."""

    loss: float = 0.01  # of the mean training loss in any window, and of every held-out loss
    norm: float = 0.10  # of the mean gradient norm in any window


def parity(first: RecordedRun, other: RecordedRun, bounds: Bounds) -> dict[str, Any]:
    """Compare two runs within bounds.

    Returns:
        `passed`: True if all checks passed. `checks`: result for each quantity. `notes`: different settings that may
        explain different losses.
    """
    checks = [
        _check(first, other, "training loss", "loss", bounds.loss, windows=True, required=True),
        _check(first, other, "held-out loss", "val_loss", bounds.loss),
        _check(first, other, "gradient norm", "grad_norm", bounds.norm, windows=True),
        _check(first, other, "learning rate", "lr", EXACT),
        _check(first, other, "tokens", "tokens", EXACT),
    ]
    a, b = set(first.columns.skipped), set(other.columns.skipped)
    if a or b:
        text = f"{len(a)} and {len(b)} steps, {len(a ^ b)} of them in one run only"
        checks.append(_result("steps that updated nothing", float(len(a ^ b)), 0.0, text))
    notes = []
    for key in EXPLAINING:
        if key in first.config and key in other.config and first.config[key] != other.config[key]:
            notes.append(f"{key} differs: {first.value(key)} and {other.value(key)}")
    for run in (first, other):
        if run.columns.damaged or run.columns.torn:
            notes.append(f"{run.name}: some lines of its records are damaged, and are not compared")
    done = [check for check in checks if check is not None]
    passed = all(check["passed"] for check in done)
    return {"first": first.name, "other": other.name, "checks": done, "notes": notes, "passed": passed}


def window_means(values: Column) -> Column:
    """Means over at most `WINDOWS` windows of adjacent values.

    All windows have equal size, except that the last one includes the remainder.
    """
    size = max(1, len(values) // WINDOWS)
    starts = np.arange(len(values) // size) * size
    ends = np.append(starts[1:], len(values))
    return np.add.reduceat(values, starts) / (ends - starts)


def _check(
    first: RecordedRun,
    other: RecordedRun,
    name: str,
    key: str,
    bound: float,
    *,
    windows: bool = False,
    required: bool = False,
) -> dict[str, Any] | None:
    steps, a, b = difference(first, other, key)
    if required and len(steps) < FEWEST:
        text = f"the runs have {len(steps)} records of the same steps, and {FEWEST} are needed"
        return _result(name, None, bound, text)
    if not len(steps):
        return None
    kind = f"{len(a)} records"
    if windows:
        a, b = window_means(a), window_means(b)
        kind = f"means of {len(a)} windows"
    wholes = np.maximum(np.abs(a), np.abs(b))
    relative = np.abs(a - b) / np.where(wholes > 0, wholes, 1.0)
    worst = int(np.argmax(relative))
    text = (
        f"at most {relative[worst]:.3g} apart in {kind} up to step {steps[-1]:,.0f}, where {bound:g} is allowed: "
        f"{short(float(a[worst]))} and {short(float(b[worst]))}"
    )
    return _result(name, float(relative[worst]), bound, text)


def _result(name: str, value: float | None, bound: float, text: str) -> dict[str, Any]:
    """Result of one parity check; `value` is the largest relative difference, None if there was nothing to compare."""
    passed = value is not None and value <= bound
    return {"name": name, "passed": passed, "value": value, "bound": bound, "text": text}


def scaling(runs: Sequence[RecordedRun], price_usd_h: float | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare the throughput of runs over their number of nodes, smallest first.

    `efficiency` is the throughput per node, relative to that of the smallest run on the same kind of machine.

    Args:
        price_usd_h: Price of one machine in USD per hour; None: the price in the table of machines.

    Returns:
        One point for each run that recorded its throughput; notes for the user. Without a price, `price_usd_h` and
        `tokens_per_usd` are None.
    """
    notes = []
    measured = []
    for run in runs:
        speed, nodes = typical(run, "tokens_per_s"), run.number("cluster.nodes")
        if not speed or speed < 0 or not nodes or nodes < 1:
            notes.append(f"{run.name} is left out: it has no throughput, or no cluster.nodes")
            continue
        measured.append((int(nodes), speed, run.name, str(run.config.get("cluster.instance", ""))))
    measured.sort(key=lambda row: row[0])
    smallest: dict[str, float] = {}
    points = []
    for nodes, speed, name, instance in measured:
        price = price_usd_h
        if price is None and instance:
            with suppress(ConfigError):
                price = find_machine(instance, {}).price_usd_h
        point: dict[str, Any] = {"name": name, "instance": instance, "nodes": nodes, "tokens_per_s": speed}
        # The same for weak and strong scaling: throughput per node, relative to the smallest run.
        point["efficiency"] = (speed / nodes) / smallest.setdefault(instance, speed / nodes)
        point["price_usd_h"] = price
        point["tokens_per_usd"] = 3600 * speed / (price * nodes) if price else None
        points.append(point)
    if points and all(point["price_usd_h"] is None for point in points):
        notes.append("tokens per dollar need a price: --price gives that of a machine's hour")
    return points, notes
