"""Options of sharding change neither losses nor norms nor weights, bit for bit, in bf16."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.models import changed, weights_of
from tests.support.parity import layout, run_ours
from tests.support.ranks import RankPool

STEPS = 3
"""The third starts from moments and weights that two updates have made."""


OPTIONS: list[dict[str, Any]] = [
    {"prefetch": 0},
    {"prefetch": 2},
    {"backward_prefetch": "none", "offload": ("params", "optimizer")},
    {"backward_prefetch": "after", "forward_prefetch": False, "offload": ("activations",)},
    {"unit_params": 40_000},  # blocks of 24 to 30 thousand
]


def test_options_of_sharding_change_no_number(ranks: RankPool) -> None:
    how: dict[str, Any] = {"params": "bf16", "update": "bf16_kahan", "remat": "selective"}
    resolved = layout("odd", tp=1, dp=2, micro=1, shard="full", **how)
    resolved = changed(resolved, precision={"accumulate": "bf16", "reduce": "bf16"})
    weights = weights_of(resolved)
    plain = ranks.run(2, run_ours, resolved, STEPS, weights)
    for options in OPTIONS:
        other = ranks.run(2, run_ours, changed(resolved, parallel=options), STEPS, weights)
        for actual, wanted in zip(other, plain, strict=True):
            assert (actual.losses, actual.norms) == (wanted.losses, wanted.norms), options
            unequal = [name for name, weight in wanted.weights.items() if not torch.equal(actual.weights[name], weight)]
            assert unequal == [], options
