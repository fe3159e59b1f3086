"""Masks between documents under every layout with stages: each document computes what transformers computes alone."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from nxtrain.config.check import Resolved
from tests.support.document_rows import documents_alone, documents_on_rank, drawn_rows
from tests.support.models import weights_of
from tests.support.parity import layout, relative_errors, whole
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
    resolved = drawn_layout(random, index)
    config: Any = resolved.config
    rows = drawn_rows(random, config.train.global_batch, config.train.seq_len, resolved.model.vocab_size)
    weights = weights_of(resolved)
    loss, number, grads = documents_alone(resolved, weights, rows)
    degrees = config.parallel
    found = ranks.run(degrees.pp * degrees.tp * degrees.dp, documents_on_rank, resolved, weights, rows)
    for rank, evaluated in found:
        assert rank.num_tokens == number
        assert (rank.loss, evaluated) == pytest.approx((loss, loss), abs=2e-6)
    errors = relative_errors(whole([rank.shards for rank, _ in found], resolved), grads)
    assert max(errors.values()) < 5e-6, errors
