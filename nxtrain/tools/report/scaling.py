"""Scaling and cost of runs that differ in their number of nodes: throughput, efficiency, tokens per dollar.

HLAT's recipe exceeds an efficiency of 0.90 at 64 nodes (Fan et al. 2024, arXiv:2404.10630).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nxtrain.common.errors import ConfigError
from nxtrain.plan.hardware import find_machine
from nxtrain.tools.report.facts import typical
from nxtrain.tools.report.run import RecordedRun


def scaling(runs: Sequence[RecordedRun], price_usd_h: float | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare runs over their nodes, the smallest first.

    Args:
        price_usd_h: Price of a machine's hour; None: that of the table of machines.

    Returns:
        A point for each run that recorded its throughput, and notes for people. `efficiency` is the throughput of a
        node over that of a node of the smallest run of the same kind of machine. Without a price, `price_usd_h` and
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
        # Weak and strong scaling alike: a node's share of the throughput, next to that of the smallest run.
        point["efficiency"] = (speed / nodes) / smallest.setdefault(instance, speed / nodes)
        point["price_usd_h"] = price
        point["tokens_per_usd"] = 3600 * speed / (price * nodes) if price else None
        points.append(point)
    if points and all(point["price_usd_h"] is None for point in points):
        notes.append("tokens per dollar need a price: --price gives that of a machine's hour")
    return points, notes
