"""Health of routers: numbers of a record, and alarms of routers that leave experts without tokens.

Loads have a row for each block, of sums over the tokens of a step: slots of each expert, tokens, entropies of the
probabilities, and slots that no expert computes. A slot is one of the experts of a token. Rows of blocks without
experts are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

Loads = Sequence[Sequence[float]]
"""Rows of E + 3 numbers."""

NUM_OTHERS = 3
"""Numbers of a row after those of the experts."""

SUSTAINED = 20
"""Number of steps between the first and the last record of a finding that raises an alarm."""
CONCENTRATED = 0.8
"""Excess over an even load that a collapsed router gives to its k busiest experts; 1: they get every token."""
MOST_NAMED = 4
"""Most experts that an alarm names one by one."""

EXPERT_SLOTS = "expert_slots"
"""Key of a record with the slots of each expert, for each block."""
ROUTER_NUMBERS = ("expert_load_min", "expert_load_max", "router_entropy", "dropped_share", EXPERT_SLOTS)
"""Keys of `router_numbers`."""


def router_numbers(loads: Loads) -> dict[str, Any]:
    """Numbers of a record: least and greatest load, mean entropy, share of the slots that no expert computes.

    A load is relative to an even one, and an entropy to that of even probabilities.
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
    """Detector of dead experts and of collapsed routers, which takes the loads of one record after the other.

    A dead expert has no token. A collapsed router gives nearly all tokens the same experts. Either is an alarm, once,
    when all records of `SUSTAINED` steps have it.

    Source: Fedus et al. 2021 (arXiv:2101.03961) section 2.2 on routers that need balance.
    """

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._named: set[str] = set()

    def see(self, step: int, loads: Loads) -> str:
        """Add the loads of a record; return the text of its alarm, empty without an alarm."""
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
            alarms.append(_of_dead(dead))
        return "; ".join(alarms)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON values."""
        return {"since": self._since, "named": sorted(self._named)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state`; an empty state starts from scratch."""
        self._since = dict(state.get("since", {}))
        self._named = set(state.get("named", ()))


def _excess(slots: Sequence[float], k: int) -> float:
    """Share of the slots of the k busiest experts: 0 with an even load, 1 if these have all; 0 if k experts are all."""
    even = k / len(slots)
    if even >= 1:
        return 0.0
    return (sum(sorted(slots)[-k:]) / sum(slots) - even) / (1 - even)


def _of_dead(names: Sequence[str]) -> str:
    """Alarm of experts without tokens, of which the first `MOST_NAMED` are named."""
    texts = []
    for name in names[:MOST_NAMED]:
        block, _, expert = name.partition(".")
        texts.append(f"{expert} of block {block}")
    if len(names) > MOST_NAMED:
        texts.append(f"{len(names) - MOST_NAMED} more")
    noun = "expert" if len(names) == 1 else "experts"
    return f"dead {noun}, without a token for {SUSTAINED} steps: {', '.join(texts)}"
