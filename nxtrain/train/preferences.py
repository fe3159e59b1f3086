"""Preference objectives DPO and ORPO on pairs of answers, computed from the log-probability of each answer.

Both answers of a pair are documents of one row, so that a loss needs no other row and no other rank. Answers 2k and 2k
+ 1 of a row are the chosen and the rejected answer of its pair k. A loss is a sum over pairs, and the step divides the
sum once, by the pairs of the global batch. `Kto` has the objective on labelled answers.

DPO and KTO compare with a reference. With adapters, the reference is the model without them. A run that trains all
weights computes the reference's log-probabilities once; see `nxtrain.train.reference`.

Shapes: S positions of this rank, B rows, K pairs that a row can hold.

Source: Rafailov et al. 2023 (arXiv:2305.18290) equation 7; Mitchell 2023, "A note on DPO with noisy preferences", for
label smoothing; Hong et al. 2024 (arXiv:2403.07691) equations 3 to 7 for ORPO.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.mesh import Axis
from nxtrain.config.finetune_schema import FinetuneConfig
from nxtrain.parallel.regions import sum_over

MEANS = ("reward_chosen", "reward_rejected", "reward_accuracy", "kl")
"""Keys of a step's record that are means over the pairs of the global batch, in the order of their sums."""

_SMALLEST = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Pairs:
    """Answers in the rows of a micro-batch, on the device.

    Args:
        numbers: (B, S) int64, number of the answer at each position of this rank.
        lengths: (B, 2K) float32, targets of each answer in the whole row; 0 for an absent answer.
        reference: (B, 2K) float32, log-probabilities by the reference; None without a reference, or before their
            computation.
        labels: (B, 2K) float32, 1 for a desirable answer, else 0; None for answers in pairs.
        divergence: () float32, KL divergence from the reference over the global batch, for labelled answers.
    """

    numbers: Tensor
    lengths: Tensor
    reference: Tensor | None = None
    labels: Tensor | None = None
    divergence: Tensor | None = None


def mean_of(total: float, number: float) -> float:
    """Mean of a sum over some targets, pairs or answers; NaN over none."""
    return total / number if number else math.nan


class Preferences:
    """Preference objective of a run on pairs of answers: DPO or ORPO.

    Attributes:
        sums: Names of the sums of a step: the loss, the number by which the loss is divided, and others.

    Args:
        config: Objective and its factors.
        cp: Ranks that share the positions of a row.
        comm: Collectives.
        put: Copies a host tensor to the device.
    """

    sums: tuple[str, ...] = ("loss", "pairs", "targets", *MEANS)

    def __init__(self, config: FinetuneConfig, cp: Axis, comm: Collectives, put: Callable[[Tensor], Tensor]) -> None:
        self._config = config
        self._cp = cp
        self._comm = comm
        self._answers = put(torch.arange(2 * config.pairs_per_row))
        # Each pair counts on one of the ranks that share its row. Data of one dimension, so that all ranks have one
        # graph: torch-xla makes constants of the numbers 0 and 1.
        self._share = put(torch.tensor([float(cp.rank == 0)])) if cp.size > 1 else None

    @property
    def needs_reference(self) -> bool:
        """True if the objective compares the model with a reference."""
        return self._config.objective != "orpo"

    def log_probs(self, token_losses: Tensor, pairs: Pairs) -> Tensor:
        """Log-probability of each answer: (S, B) cross entropies of this rank's tokens to (B, 2K) float32."""
        is_of_answer = pairs.numbers.t().unsqueeze(-1) == self._answers
        parts = torch.where(is_of_answer, -token_losses.unsqueeze(-1), 0.0).sum(dim=0)
        return sum_over(parts, self._comm, self._cp)

    def loss(self, token_losses: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Sum of the losses of all pairs, and this rank's contribution to the `sums` of a step.

        Args:
            token_losses: (S, B) float32, cross entropies of this rank's tokens.
            pairs: Pairs of the rows, with the reference's log-probabilities if the objective needs them.

        Returns:
            () float32, and a float32 vector with an entry for each of `sums`, without a gradient.
        """
        log_probs = self.log_probs(token_losses, pairs)
        if self.needs_reference:
            losses, rewards = self._dpo(log_probs, pairs)
        else:
            losses, rewards = self._orpo(log_probs, pairs)
        is_there = pairs.lengths.unflatten(-1, (-1, 2))[..., 0] > 0
        total = torch.where(is_there, losses, 0.0).sum()
        chosen, rejected = rewards.detach().unflatten(-1, (-1, 2)).unbind(-1)
        divergence = torch.zeros_like(chosen)
        if self.needs_reference:
            divergence = (chosen + rejected) / (-2.0 * self._config.beta)
        of_pairs = torch.stack([is_there.float(), chosen, rejected, (chosen > rejected).float(), divergence])
        counted, *means = torch.where(is_there, of_pairs, 0.0).flatten(1).sum(dim=1).unbind()
        return total, self._own([total.detach(), counted, pairs.lengths.sum(), *means])

    def means(self, read: dict[str, float]) -> dict[str, float]:
        """Means for the record of a step, computed from the step's sums, which are removed from `read`."""
        pairs = read.pop("pairs")
        means = {name: mean_of(read.pop(name), pairs) for name in MEANS}
        return {"pairs": pairs, **means, "reward_margin": means["reward_chosen"] - means["reward_rejected"]}

    def _own(self, sums: Sequence[Tensor]) -> Tensor:
        """Stack sums over rows on one context parallel rank; zeros on the other cp ranks, which have the same sums."""
        stacked = torch.stack([*sums])
        return stacked if self._share is None else stacked * self._share

    def _dpo(self, log_probs: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """DPO losses of the pairs, (B, K), and rewards of the answers, (B, 2K)."""
        assert pairs.reference is not None
        rewards = self._config.beta * (log_probs - pairs.reference)
        chosen, rejected = rewards.unflatten(-1, (-1, 2)).unbind(-1)
        margin, smoothing = chosen - rejected, self._config.label_smoothing
        losses = -F.logsigmoid(margin)
        if smoothing:
            losses = (1 - smoothing) * losses - smoothing * F.logsigmoid(-margin)
        return losses, rewards

    def _orpo(self, log_probs: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """ORPO losses of the pairs, (B, K), and rewards of the answers, (B, 2K): weighted mean log-probabilities."""
        means = log_probs / pairs.lengths.clamp(min=1)
        # An absent answer gets a value whose odds have a finite gradient; its loss is masked later.
        means = torch.where(pairs.lengths > 0, means, -1.0)
        log_odds = means - torch.log(-torch.expm1(means.clamp(max=-_SMALLEST)))
        chosen, rejected = log_odds.unflatten(-1, (-1, 2)).unbind(-1)
        likelihood = means.unflatten(-1, (-1, 2))[..., 0]
        weight = self._config.orpo_lambda
        return -likelihood - weight * F.logsigmoid(chosen - rejected), weight * means
