"""KTO objective: training on answers that are labelled as desirable or undesirable, compared with a reference model.

The value of an answer is relative to the KL divergence of the model from the reference. The divergence is estimated
over the global batch, from answers that belong to other prompts (`nxtrain.data.loader.swap_answers`). So each step
first computes these swapped answers of all its micro-batches, without gradients.

Shapes: S positions of this rank, B rows, 2K answers that a row can hold.

Source: Ethayarajh et al. 2024 (arXiv:2402.01306) equations 6 to 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nxtrain.common.mesh import Axis
from nxtrain.train.preferences import Pairs, Preferences, mean_of


class Kto(Preferences):
    """KTO objective of a run on labelled answers; arguments as in `Preferences`."""

    sums = ("loss", "answers", "targets", "desirable", "reward_chosen", "reward_rejected", "reward_accuracy", "kl")

    @staticmethod
    def divergence_sums(model: Sequence[Tensor], reference: Sequence[Tensor], swapped: Sequence[Pairs]) -> Tensor:
        """Sum of the log-ratios of swapped answers, and the number of these answers: (2,) float32.

        Args:
            model, reference: (B, 2K) log-probabilities of each micro-batch; empty on ranks that compute none.
            swapped: Swapped answers of each micro-batch, present on every rank.
        """
        total = torch.zeros_like(swapped[0].lengths[0, :2])
        for of_model, of_reference, answers in zip(model, reference, swapped, strict=False):
            is_there = answers.lengths > 0
            ratios = torch.where(is_there, of_model - of_reference, 0.0)
            total = total + torch.stack([ratios.sum(), is_there.float().sum()])
        return total

    def divergence(
        self, model: Sequence[Tensor], reference: Sequence[Tensor], swapped: Sequence[Pairs], batch: Axis
    ) -> Tensor:
        """KL divergence from the reference over the ranks of a global batch, at least 0: () float32.

        Args:
            model, reference, swapped: As in `divergence_sums`.
            batch: Axis of the ranks that share a global batch.
        """
        # The ranks of cp have the same answers, so that summing over them does not change the mean.
        sums = self._comm.all_reduce(self.divergence_sums(model, reference, swapped), batch)
        total, number = sums.unbind()
        return (total / number.clamp(min=1.0)).clamp(min=0.0)

    def loss(self, token_losses: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Sum of the KTO losses of all answers, and this rank's contribution to the `sums`; see `Preferences.loss`."""
        config, labels = self._config, pairs.labels
        assert labels is not None and pairs.reference is not None and pairs.divergence is not None
        log_ratios = self.log_probs(token_losses, pairs) - pairs.reference
        is_desirable = labels > 0
        side = 2.0 * labels - 1.0
        weights = torch.where(is_desirable, config.desirable_weight, config.undesirable_weight)
        advantage = side * (log_ratios - pairs.divergence)
        is_there = pairs.lengths > 0
        total = torch.where(is_there, weights * torch.sigmoid(-config.beta * advantage), 0.0).sum()
        rewards = config.beta * log_ratios.detach()
        of_answers = torch.stack(
            [
                torch.ones_like(labels),
                labels,
                rewards * labels,
                rewards * (1.0 - labels),
                (advantage > 0).float(),
                pairs.divergence.expand_as(labels),
            ]
        )
        counted, *others = torch.where(is_there, of_answers, 0.0).flatten(1).sum(dim=1).unbind()
        return total, self._own([total.detach(), counted, pairs.lengths.sum(), *others])

    def means(self, read: dict[str, float]) -> dict[str, float]:
        """Means for the record of a step; the reward of a label is absent if the global batch has no such answer."""
        numbers = {name: read.pop(name) for name in self.sums if name not in {"loss", "targets"}}
        answers, desirable = numbers["answers"], numbers["desirable"]
        means = {name: mean_of(numbers[name], answers) for name in ("reward_accuracy", "kl")}
        for name, count in (("reward_chosen", desirable), ("reward_rejected", answers - desirable)):
            if count:
                means[name] = numbers[name] / count
        if 0 < desirable < answers:
            means["reward_margin"] = means["reward_chosen"] - means["reward_rejected"]
        return {"answers": answers, "desirable": desirable, **means}


OBJECTIVES = {"dpo": Preferences, "orpo": Preferences, "kto": Kto}
"""Classes of objectives that compare answers, by value of `finetune.objective`."""
