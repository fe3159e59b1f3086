"""Times of all ranks of a run next to each other, as the newest start recorded them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median_low

from nxtrain.common.io.regular import read_text
from nxtrain.common.run_folder import LOGS_DIR, RANKS_FILE
from nxtrain.tools.report.facts import Table
from nxtrain.tools.report.run import RecordedRun

KINDS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "reduce": "reduction",
    "optimizer": "update",
    "training": "steps",
    "waiting": "waiting for others",
    "log": "reading numbers",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "vote": "comparing replicas",
}
"""Kinds of work in the order of the columns."""

SHOWN = 8  # ranks of a table, those that others wait for most
MOST_S = 1e9  # largest time that is accepted


def read_rates(folder: Path) -> dict[int, dict[str, float]]:
    """Seconds per step of each rank by kind of work; empty if there are none, or if the file is damaged."""
    try:
        content = json.loads(read_text(folder / LOGS_DIR / RANKS_FILE))
        rates = {}
        for rank, rate in content.items():
            rates[int(rank)] = {kind: float(rate[kind]) for kind in KINDS if kind in rate}
    except (AttributeError, OSError, OverflowError, RecursionError, TypeError, ValueError):
        return {}
    for rank, rate in rates.items():
        if rank < 0 or not all(0 <= s <= MOST_S for s in rate.values()):
            return {}
    return rates


def rank_times(run: RecordedRun) -> tuple[Table | None, str]:
    """Milliseconds per step of the ranks that others wait for most, and a sentence; None for a lone rank."""
    rates = read_rates(run.folder)
    if len(rates) < 2:  # noqa: PLR2004 - a rank and another
        return None, ""
    kinds = []
    middle = {}
    for kind in KINDS:
        times_s = [rate.get(kind, 0.0) for rate in rates.values()]
        if max(times_s) >= 5e-7:  # noqa: PLR2004 - less would be written as 0.00 ms
            kinds.append(kind)
            middle[kind] = median_low(times_s)
    busy_s = {}
    for rank, rate in rates.items():
        busy_s[rank] = sum(s for kind, s in rate.items() if kind != "waiting")
    shown = sorted(rates, key=lambda rank: (-busy_s[rank], rank))[:SHOWN]

    def row(name: str, of: Mapping[str, float]) -> tuple[str, ...]:
        return name, *(f"{1e3 * of.get(kind, 0.0):.2f}" for kind in kinds), f"{1e3 * sum(of.values()):.2f}"

    # Medians of kinds do not add up to a step, so that their row has no sum.
    rows = [*(row(f"rank {rank}", rates[rank]) for rank in shown), (*row("median", middle)[:-1], "")]
    slowest = shown[0]
    excess_s = {kind: rates[slowest].get(kind, 0.0) - middle[kind] for kind in kinds}
    worst = max(kinds, key=lambda kind: -1.0 if kind == "waiting" else excess_s[kind])
    sentence = f"Milliseconds per step over the last steps. Rank {slowest} is the busiest"
    if excess_s[worst] > 0:
        sentence += f", by {1e3 * excess_s[worst]:.2f} ms in {KINDS[worst]}"
    sentence += "."
    if len(rates) > SHOWN:
        sentence += f" The {SHOWN} busiest of {len(rates):,} ranks are shown."
    return Table(("", *(KINDS[kind] for kind in kinds), "sum"), tuple(rows)), sentence
