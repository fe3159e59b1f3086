"""Communication leaves its inputs as they are, on a process group, as `tests/unit/test_input_contract.py` has it."""

from __future__ import annotations

import pytest

from tests.support.contract_layers import hold_collectives, hold_functions, hold_layers
from tests.support.ranks import RankPool

SEED = 0
DRAWS = 12
TP = 2

PARALLEL = (
    "_ColumnProduct",
    "_SplitProduct",
    "_GatherSequence",
    "_ScatterSequence",
    "_ReduceGradient",
    "_ReduceSum",
    "_VocabCrossEntropy",
    "_Gather",
    "_Ring",
    "_FusedRing",
)


def test_autograd_functions_that_communicate_keep_what_they_are_given(ranks: RankPool) -> None:
    ranks.run(TP, hold_functions, PARALLEL, SEED, DRAWS)


def test_layers_keep_what_they_are_given(either: RankPool) -> None:
    either.run(TP, hold_layers, SEED, DRAWS)


@pytest.mark.parametrize("world", [1, TP])
def test_collectives_keep_their_inputs_unless_they_may_overwrite_them(ranks: RankPool, world: int) -> None:
    ranks.run(world, hold_collectives, SEED)
