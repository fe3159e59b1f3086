"""Shape of a Mixtral."""

from __future__ import annotations

from nxtrain.common.dimensions import MoeShape
from nxtrain_models.decoder.config import Count, Positive
from nxtrain_models.decoder.mixture import MixtureConfig


class MixtralConfig(MixtureConfig):
    """Shape of a Mixtral, as `MixtralConfig` of transformers."""

    num_key_value_heads: Count | None = 8
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 1_000_000.0
    max_position_embeddings: Count = 131_072
    num_local_experts: Count = 8
    """Experts of a block; intermediate_size is the width inside of each."""

    @property
    def mixture(self) -> MoeShape:
        """Experts of the blocks, under the names of Mixtral's own files."""
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
