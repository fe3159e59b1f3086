"""Configuration of Mixtral models."""

from __future__ import annotations

from nxtrain.common.dimensions import MoeShape
from nxtrain_models.decoder.config import Count, Positive
from nxtrain_models.decoder.mixture import MixtureConfig


class MixtralConfig(MixtureConfig):
    """Configuration of a Mixtral model, as `MixtralConfig` of transformers."""

    num_key_value_heads: Count | None = 8
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 1_000_000.0
    max_position_embeddings: Count = 131_072
    num_local_experts: Count = 8
    """Number of experts per block; intermediate_size is the width of one expert."""

    @property
    def mixture(self) -> MoeShape:
        """Shape of the mixture of experts, with the parameter names of Mixtral's files."""
        return MoeShape(
            num_experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            expert_size=self.intermediate_size,
            aux_loss_coef=self.router_aux_loss_coef,
            module="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
        )
