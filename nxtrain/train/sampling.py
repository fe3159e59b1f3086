"""The choice of the next token from a model's scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nxtrain.errors import DivergedError


@dataclass(frozen=True)
class Sampling:
    """Rule by which tokens are drawn.

    Args:
        temperature: Divides the scores; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to choose among; 0: all.
        top_p: Joint probability of the likeliest tokens to choose among; 1: all.

    Source: Holtzman et al. 2020 (arXiv:1904.09751) section 3.1, for top_p.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0

    def draw(self, scores: Tensor, generator: torch.Generator) -> int:
        """Choose a token.

        Args:
            scores: (V,) of the vocabulary.
            generator: Random generator of the draw.

        Raises:
            DivergedError: Scores are not finite.
        """
        if not bool(torch.isfinite(scores).all()):
            raise DivergedError("the model's scores are not finite: its weights diverged; take an earlier checkpoint")
        if self.temperature == 0:
            return int(scores.argmax())
        best, tokens = scores.double().topk(min(self.top_k or scores.numel(), scores.numel()))
        # Subtract the best score first: dividing by a temperature near 0 would overflow.
        chances = ((best - best[0]) / self.temperature).softmax(0)
        before = chances.cumsum(0) - chances
        chances = torch.where(before < self.top_p, chances, 0.0)
        return int(tokens[torch.multinomial(chances, 1, generator=generator)])
