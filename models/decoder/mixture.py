"""Shape of a decoder whose feed-forwards are mixtures of experts.

Source: Jiang et al. 2024 (arXiv:2401.04088) section 2; Fedus et al. 2021 (arXiv:2101.03961) for the auxiliary loss.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from nxtrain_models.decoder.config import Count
from nxtrain_models.decoder.window import WindowConfig

Coefficient = Annotated[float, Field(ge=0, le=1e6)]


class MixtureConfig(WindowConfig):
    """Shape of a decoder with experts; the number of experts has another name in each family."""

    num_experts_per_tok: Count = 2
    """Experts that a token passes through."""
    router_aux_loss_coef: Coefficient = 0.001
    """Factor of the loss that balances the load of the experts; 0: none."""
    output_router_logits: bool = False
    """Switch of transformers, which adds its auxiliary loss only with it; kept for transformers, and not read here."""

    @model_validator(mode="after")
    def _enough_experts(self) -> MixtureConfig:
        mixture = self.mixture
        if mixture is not None and mixture.experts_per_token > mixture.num_experts:
            k, most = mixture.experts_per_token, mixture.num_experts
            raise ValueError(f"num_experts_per_tok={k} exceeds the {most} experts of a block; use {most} at most")
        return self
