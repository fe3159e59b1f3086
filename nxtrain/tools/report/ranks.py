"""Times of all ranks of a run beside each other, as the newest start recorded them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median_low

from nxtrain.common.io.regular import read_text
from nxtrain.common.run_folder import LOGS_DIR, RANKS_FILE
from nxtrain.tools.report.facts import Table
from nxtrain.tools.report.run import Run

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

SHOWN = 8
"""Most ranks of a table, those that others wait for most."""

MOST_S = 1e9
"""Largest time that counts as one."""

Rates = Mapping[int, Mapping[str, float]]
"""Seconds per step of each rank by kind of work."""


def read_rates(folder: Path) -> Rates:
    """Times of the ranks; empty if there are none, or if the file is damaged."""
    try:
        found = json.loads(read_text(folder / LOGS_DIR / RANKS_FILE))
        rates = {int(rank): {kind: float(rate[kind]) for kind in KINDS if kind in rate} for rank, rate in found.items()}
    except (AttributeError, OSError, OverflowError, RecursionError, TypeError, ValueError):
        return {}
    whole = all(0 <= s <= MOST_S for rate in rates.values() for s in rate.values())
    return rates if whole and all(rank >= 0 for rank in rates) else {}


def rank_times(run: Run) -> tuple[Table | None, str]:
    """Milliseconds per step of the ranks that others wait for most, and a sentence; None for a lone rank."""
    rates = read_rates(run.folder)
    if len(rates) < 2:  # noqa: PLR2004 - a rank and another
        return None, ""
    kinds = [kind for kind in KINDS if any(rate.get(kind, 0.0) >= 5e-7 for rate in rates.values())]  # noqa: PLR2004
    own_s = {rank: sum(s for kind, s in rate.items() if kind != "waiting") for rank, rate in rates.items()}
    shown = sorted(rates, key=lambda rank: (-own_s[rank], rank))[:SHOWN]

    def row(name: str, of: Mapping[str, float]) -> tuple[str, ...]:
        return name, *(f"{1e3 * of.get(kind, 0.0):.2f}" for kind in kinds), f"{1e3 * sum(of.values()):.2f}"

    middle = {kind: median_low([rate.get(kind, 0.0) for rate in rates.values()]) for kind in kinds}
    # Medians of kinds do not add up to a step, so that their row has no sum.
    rows = [*(row(f"rank {rank}", rates[rank]) for rank in shown), (*row("median", middle)[:-1], "")]
    slowest = shown[0]
    worst = max(kinds, key=lambda kind: rates[slowest].get(kind, 0.0) - middle[kind] if kind != "waiting" else -1.0)
    excess_s = rates[slowest].get(worst, 0.0) - middle[worst]
    sentence = f"Milliseconds per step over the last steps. Rank {slowest} is the busiest"
    sentence += f", by {1e3 * excess_s:.2f} ms in {KINDS[worst]}." if excess_s > 0 else "."
    if len(rates) > SHOWN:
        sentence += f" The {SHOWN} busiest of {len(rates):,} ranks are shown."
    return Table(("", *(KINDS[kind] for kind in kinds), "sum"), tuple(rows)), sentence
