"""Rows of packed documents, and what a model of transformers computes of each document alone."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.vocab import END_BIT, ID_MASK, IGNORE_INDEX
from nxtrain.config.check import Resolved
from nxtrain.data.loader import batch_of
from nxtrain.train.step import DeviceBatch, eval_step
from tests.support.corpora import END, drawn_row
from tests.support.models import hf_model
from tests.support.parity import Gradient, gradient, start

Rows = NDArray[np.int64]


def drawn_rows(random: Random, number: int, seq_len: int, vocab_size: int) -> Rows:
    """Rows of packed documents, of which some have targets."""
    rows = np.full((number, seq_len + 1), IGNORE_INDEX, np.int64)
    while not (rows[:, 1:] != IGNORE_INDEX).any() or (rows & END_BIT).all():
        rows = np.array([drawn_row(random, vocab_size, seq_len) for _ in range(number)])
    return rows


def documents_on_rank(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], rows: Rows
) -> tuple[Gradient, float]:
    """Gradient of a global batch, and the mean loss that an evaluation finds."""
    state = start(backend, resolved, weights)
    dp = state.mesh.dp
    share = np.split(rows, dp.size)[dp.rank]
    found = batch_of(share, resolved.config.train.micro_batch, end_id=END, doc_mask=True)
    assert found.starts is not None
    inputs, targets, starts = map(torch.from_numpy, (found.inputs, found.targets, found.starts))
    batch = DeviceBatch.of(inputs, targets, backend.put, starts, state.positions)
    losses, numbers = zip(*eval_step(state, batch), strict=True)
    return gradient(state, batch), float(sum(losses)) / float(sum(numbers))


def documents_alone(
    resolved: Resolved, weights: Mapping[str, Tensor], rows: Rows
) -> tuple[float, int, dict[str, Tensor]]:
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
