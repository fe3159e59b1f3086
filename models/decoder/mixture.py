"""Configuration of a decoder whose feed-forward layers are mixtures of experts.

Source: Jiang et al. 2024 (arXiv:2401.04088) section 2; Fedus et al. 2021 (arXiv:2101.03961) for the auxiliary loss.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from nxtrain_models.decoder.config import Count
from nxtrain_models.decoder.window import WindowConfig

Coefficient = Annotated[float, Field(ge=0, le=1e6)]


class MixtureConfig(WindowConfig):
    """Configuration of a decoder with experts; the key for the number of experts differs between families."""

    num_experts_per_tok: Count = 2
    """Number of experts that process each token."""
    router_aux_loss_coef: Coefficient = 0.001
    """Coefficient of the router's load balancing loss; 0 for no such loss."""
    output_router_logits: bool = False
    """Key of transformers that enables its auxiliary loss; nxtrain keeps the value for exports and does not read it."""

    @model_validator(mode="after")
    def _enough_experts(self) -> MixtureConfig:
        mixture = self.mixture
        if mixture is not None and mixture.experts_per_token > mixture.num_experts:
            k, most = mixture.experts_per_token, mixture.num_experts
            raise ValueError(f"num_experts_per_tok={k} exceeds the {most} experts of a block; use {most} at most")
        return self
