"""Scaling and cost of runs that differ in their number of nodes: throughput, efficiency, tokens per dollar."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from nxtrain.common.errors import ConfigError
from nxtrain.plan.hardware import find_machine
from nxtrain.tools.report.facts import typical
from nxtrain.tools.report.run import RecordedRun

GOAL = 0.90
"""Efficiency at 64 nodes that HLAT's recipe exceeds.

Source: Fan et al. 2024 (arXiv:2404.10630).
"""


@dataclass(frozen=True)
class Point:
    """A run at its number of nodes.

    Args:
        instance: Kind of machine; empty if unknown.
        tokens_per_s: Median throughput of all ranks.
        efficiency: Throughput of a node over that of a node of the smallest run of the same kind of machine.
        price_usd_h: Price of a machine's hour; None if unknown.
        tokens_per_usd: Tokens that a dollar buys; None without a price.
    """

    name: str
    instance: str
    nodes: int
    tokens_per_s: float
    efficiency: float
    price_usd_h: float | None = None
    tokens_per_usd: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The point as JSON."""
        return asdict(self)


def scaling(runs: Sequence[RecordedRun], price_usd_h: float | None = None) -> tuple[list[Point], list[str]]:
    """Compare runs over their nodes, the smallest first.

    Args:
        price_usd_h: Price of a machine's hour; None: that of the table of machines.

    Returns:
        A point for each run that recorded its throughput, and notes for people.
    """
    notes = []
    measured = []
    for run in runs:
        speed, nodes = typical(run, "tokens_per_s"), run.number("cluster.nodes")
        if not speed or speed < 0 or not nodes or nodes < 1:
            notes.append(f"{run.name} is left out: it has no throughput, or no cluster.nodes")
            continue
        instance = str(run.config.get("cluster.instance", ""))
        measured.append((run.name, instance, int(nodes), speed))
    measured.sort(key=lambda row: row[2])
    smallest: dict[str, float] = {}
    points = []
    for name, instance, nodes, speed in measured:
        # Weak and strong scaling alike: a node's share of the throughput, next to that of the smallest run.
        efficiency = (speed / nodes) / smallest.setdefault(instance, speed / nodes)
        price = price_usd_h
        if price is None and instance:
            with suppress(ConfigError):
                price = find_machine(instance, {}).price_usd_h
        per_usd = None
        if price:
            per_usd = 3600 * speed / (price * nodes)
        points.append(Point(name, instance, nodes, speed, efficiency, price, per_usd))
    if points and all(point.price_usd_h is None for point in points):
        notes.append("tokens per dollar need a price: --price gives that of a machine's hour")
    return points, notes
