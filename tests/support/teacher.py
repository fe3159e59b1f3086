"""Drawn tokens of a teacher, and the loss of transformers' logits on the whole distribution that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nxtrain.common.vocab import IGNORE_INDEX, PROBABILITY_UNITS, true_targets
from nxtrain.data.teacher import mixed


def drawn_tokens(
    rng: np.random.Generator, num_rows: int, k: int, seq_len: int, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Different ids for each target and their probabilities in units, (n, K, S) each; some targets have none."""
    ids = rng.random((num_rows, vocab_size, seq_len)).argsort(axis=1)[:, :k].astype(np.int64)
    scores = np.sort(rng.normal(size=(num_rows, k, seq_len)), axis=1)[:, ::-1]
    probabilities = 0.9 * np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    units = (probabilities * PROBABILITY_UNITS).astype(np.int64)
    units[rng.random((num_rows, 1, seq_len)).repeat(k, axis=1) < 0.1] = 0
    return ids, units


def taught_pairs(
    pairs: Sequence[tuple[Tensor, Tensor]], *, k: int, vocab_size: int, weight: float, masked: float = 0.0
) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets with the tokens of a teacher, (n, 2R, S), of which a share does not count as well."""
    rng = np.random.default_rng(k)
    results = []
    for inputs, targets in pairs:
        own = np.where(rng.random(targets.shape) < masked, IGNORE_INDEX, targets.numpy())
        ids, units = drawn_tokens(rng, len(own), k, own.shape[1], vocab_size)
        results.append((inputs, torch.from_numpy(mixed(own, ids, units, weight))))
    return results


def entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of torch's cross entropies of (n, S, V) logits, to targets or to whole distributions of (n, 2R, S)."""
    own = true_targets(targets)
    if targets is own:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    ids, units = targets.movedim(1, -1).chunk(2, dim=-1)
    dense = torch.zeros_like(logits).scatter_add(-1, ids.clamp(min=0), units.to(logits.dtype) / PROBABILITY_UNITS)
    return F.cross_entropy(logits.movedim(-1, 1), dense.movedim(-1, 1), reduction="none")[own != IGNORE_INDEX].sum()


def dense_loss(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[torch.nn.Module, int], Tensor]:
    """Loss of a step: torch's divergence from whole distributions, and their entropy, on transformers' logits."""

    def loss(model: torch.nn.Module, step: int) -> Tensor:
        inputs, targets = pairs[step]
        log_q = model(input_ids=inputs).logits.double().log_softmax(-1)
        ids, units = targets.movedim(1, -1).chunk(2, dim=-1)
        counts = ids[..., 0] != IGNORE_INDEX
        dense = torch.zeros_like(log_q).scatter_add(-1, ids.clamp(min=0), units.double() / PROBABILITY_UNITS)
        divergence = F.kl_div(log_q, dense, reduction="none").sum(-1)
        entropy = -torch.xlogy(dense, dense).sum(-1)
        return (divergence + entropy)[counts].mean()

    return loss
