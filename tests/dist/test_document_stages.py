"""Masks between documents under every layout with stages: each document computes what transformers computes alone."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.vocab import END_BIT, ID_MASK, IGNORE_INDEX
from nxtrain.config.check import Resolved
from nxtrain.data.loader import batch_of
from nxtrain.train.step import DeviceBatch, eval_step
from tests.support.corpora import drawn_row
from tests.support.models import hf_model, weights_of
from tests.support.parity import Gradient, gradient, layout, relative_errors, start, whole
from tests.support.ranks import RankPool

END, SEED, CASES = 0, 0, 10
Rows = NDArray[np.int64]


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


def on_rank(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], rows: Rows) -> tuple[Gradient, float]:
    """Gradient of a global batch, and the mean loss that an evaluation finds."""
    state = start(backend, resolved, weights)
    dp = state.mesh.dp
    share = np.split(rows, dp.size)[dp.rank]
    found = batch_of(share, resolved.config.train.micro_batch, end_id=END, doc_mask=True)
    assert found.starts is not None
    inputs, targets, starts = map(torch.from_numpy, (found.inputs, found.targets, found.starts))
    batch = DeviceBatch.of(inputs, targets, backend.put, starts)
    losses, numbers = zip(*eval_step(state, batch), strict=True)
    return gradient(state, batch), float(sum(losses)) / float(sum(numbers))


def alone(resolved: Resolved, weights: Mapping[str, Tensor], rows: Rows) -> tuple[float, int, dict[str, Tensor]]:
    """Mean loss, targets and gradients of transformers, which gets one document at a time."""
    model = hf_model(resolved, weights=weights)
    pieces = []
    for row in rows:
        tokens = row[row != IGNORE_INDEX]
        pieces += np.split(tokens & ID_MASK, np.flatnonzero(tokens & END_BIT) + 1)
    documents = [torch.from_numpy(part) for part in pieces]
    number = sum(max(0, len(part) - 1) for part in documents)
    total = 0.0
    for part in documents:
        if len(part) > 1:
            logits = model(input_ids=part[None, :-1]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum") / number
            loss.backward()
            total += loss.item()
    return total, number, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("index", range(CASES))
def test_documents_of_a_drawn_layout_with_stages_are_those_of_transformers(ranks: RankPool, index: int) -> None:
    random = Random(SEED + index)
    resolved = drawn_layout(random, index)
    config: Any = resolved.config
    sizes = resolved.model.vocab_size, config.train.seq_len
    rows = np.array([drawn_row(random, *sizes) for _ in range(config.train.global_batch)])
    weights = weights_of(resolved)
    loss, number, grads = alone(resolved, weights, rows)
    degrees = config.parallel
    found = ranks.run(degrees.pp * degrees.tp * degrees.dp, on_rank, resolved, weights, rows)
    for rank, evaluated in found:
        assert rank.num_tokens == number
        assert (rank.loss, evaluated) == pytest.approx((loss, loss), abs=2e-6)
    errors = relative_errors(whole([rank.shards for rank, _ in found], resolved), grads)
    assert max(errors.values()) < 5e-6, errors
