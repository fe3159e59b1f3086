"""Health of mixture-of-experts routers: metrics of their loads, and alarms for dead experts and collapsed routers.

Loads have one row for each block, with sums over the tokens of a step. A row has the slots of each expert, the tokens,
the entropies of the probabilities, and the dropped slots. A slot is one assignment of a token to an expert. Rows of
blocks without experts are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

Loads = Sequence[Sequence[float]]
"""Router loads of all blocks: one row of E + 3 numbers for each block."""

NUM_OTHERS = 3
"""Number of entries of a load row after the slots of the experts."""

SUSTAINED = 20
"""Number of steps between the first and the last record of a finding before it raises an alarm."""
CONCENTRATED = 0.8
"""Excess share of the k busiest experts above which a router counts as collapsed; 1 means that they get all tokens."""
MOST_NAMED = 4
"""Maximum number of experts that an alarm lists."""

EXPERT_SLOTS = "expert_slots"
"""Record key for the slots of each expert in each block."""
ROUTER_NUMBERS = ("expert_load_min", "expert_load_max", "router_entropy", "dropped_share", EXPERT_SLOTS)
"""Record keys of the values from `router_numbers`."""


def router_numbers(loads: Loads) -> dict[str, Any]:
    """Router metrics of a record: minimum and maximum load, mean entropy, and share of dropped slots.

    Loads are relative to an even load, and entropies to the entropy of even probabilities.
    """
    rows = [row for row in loads if row[-NUM_OTHERS]]
    relative, entropies = [], []
    for row in rows:
        slots, (tokens, entropy, _) = row[:-NUM_OTHERS], row[-NUM_OTHERS:]
        relative += [len(slots) * number / sum(slots) for number in slots]
        largest = math.log(len(slots)) if len(slots) > 1 else 1.0
        entropies.append(entropy / tokens / largest)
    num_slots = sum(sum(row[:-NUM_OTHERS]) for row in rows)
    dropped = sum(row[-1] for row in rows) / num_slots
    by_expert = [list(map(int, row[:-NUM_OTHERS])) for row in loads]
    values = (min(relative), max(relative), fmean(entropies), dropped, by_expert)
    return dict(zip(ROUTER_NUMBERS, values, strict=True))


class RouterWatch:
    """Detector of dead experts and collapsed routers, from the loads of consecutive records.

    A dead expert gets no token. A collapsed router sends nearly all tokens to the same experts. Each raises an alarm
    once, if all records over `SUSTAINED` steps have the finding.

    Source: Fedus et al. 2021 (arXiv:2101.03961) section 2.2 on routers that need balance.
    """

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._named: set[str] = set()

    def see(self, step: int, loads: Loads) -> str:
        """Add the loads of a record; return the text of an alarm, or an empty string."""
        routers: list[str] = []
        experts: list[str] = []
        for block, row in enumerate(loads):
            slots, tokens = row[:-NUM_OTHERS], row[-NUM_OTHERS]
            if not tokens:
                continue
            if _excess(slots, round(sum(slots) / tokens)) > CONCENTRATED:
                routers.append(f"{block}")
            experts += [f"{block}.{expert}" for expert, number in enumerate(slots) if not number]
        self._since = {key: self._since.get(key, step) for key in (*routers, *experts)}
        self._named &= self._since.keys()
        due = [key for key, first in self._since.items() if step - first >= SUSTAINED and key not in self._named]
        self._named.update(due)
        collapsed = [key for key in due if "." not in key]
        # Of a collapsed router, most experts are dead.
        dead = [key for key in due if "." in key and key.partition(".")[0] not in routers]
        alarms = []
        if collapsed:
            noun = "router of block" if len(collapsed) == 1 else "routers of blocks"
            blocks = ", ".join(collapsed)
            alarms.append(
                f"the {noun} {blocks} collapsed: for {SUSTAINED} steps nearly all tokens chose the same experts"
            )
        if dead:
            texts = []
            for key in dead[:MOST_NAMED]:
                router, _, expert = key.partition(".")
                texts.append(f"{expert} of block {router}")
            if len(dead) > MOST_NAMED:
                texts.append(f"{len(dead) - MOST_NAMED} more")
            noun = "expert" if len(dead) == 1 else "experts"
            alarms.append(f"dead {noun}, without a token for {SUSTAINED} steps: {', '.join(texts)}")
        return "; ".join(alarms)

    def state(self) -> dict[str, Any]:
        """State of the detector for a checkpoint, as JSON values."""
        return {"since": self._since, "named": sorted(self._named)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`; an empty state resets the detector."""
        self._since = dict(state.get("since", {}))
        self._named = set(state.get("named", ()))


def _excess(slots: Sequence[float], k: int) -> float:
    """Excess share of slots of the k busiest experts: 0 with an even load, 1 if they have all slots.

    The result is 0 if there are only k experts.
    """
    even = k / len(slots)
    if even >= 1:
        return 0.0
    return (sum(sorted(slots)[-k:]) / sum(slots) - even) / (1 - even)
