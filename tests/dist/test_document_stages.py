"""Masks between documents under every layout with stages: each document computes what transformers computes alone."""

from __future__ import annotations

from random import Random

import pytest

from nxtrain.config.check import Resolved
from tests.support.document_rows import hold_documents
from tests.support.parity import layout
from tests.support.ranks import RankPool

SEED, CASES = 0, 10


def drawn_layout(random: Random, index: int) -> Resolved:
    """A layout of at most four ranks; the first ones have each schedule, interleaved stages, and further axes."""
    pp, tp, dp = [(2, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)][index % 5]
    schedule = "zero_bubble" if index in (1, 3) else "1f1b"
    virtual_pp = 1 if schedule == "zero_bubble" else [2, 1][index % 2]
    micro = random.choice((1, 2))
    layers = random.randint(pp * virtual_pp, pp * virtual_pp + 1)
    return layout(
        random.choice(("mha", "gqa2", "tied", "llama3-rope")),
        pp=pp,
        tp=tp,
        dp=dp,
        virtual_pp=virtual_pp,
        schedule=schedule,
        micro=micro,
        batch=micro * dp * random.randint(1, 4),
        remat=random.choice(("none", "selective", "full")),
        config={"num_hidden_layers": layers},
    )


@pytest.mark.parametrize("index", range(CASES))
def test_documents_of_a_drawn_layout_with_stages_are_those_of_transformers(ranks: RankPool, index: int) -> None:
    random = Random(SEED + index)
    hold_documents(ranks, drawn_layout(random, index), random, bound=5e-6)
