"""Configuration of Qwen3 models with experts."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from nxtrain.common.dimensions import MoeShape
from nxtrain_models.decoder.config import Count
from nxtrain_models.decoder.mixture import MixtureConfig


class Qwen3MoeConfig(MixtureConfig):
    """Configuration of a Qwen3 model with experts, as `Qwen3MoeConfig` of transformers; a given window is enabled."""

    head_norms: ClassVar[bool] = True

    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 32_768
    num_experts_per_tok: Count = 8
    num_experts: Count = 128
    """Number of experts per block."""
    moe_intermediate_size: Count = 768
    """Intermediate size of an expert; intermediate_size is for blocks without experts."""
    norm_topk_prob: bool = False
    """Normalize the router weights of a token's experts to sum 1; otherwise they are probabilities over all experts."""
    decoder_sparse_step: Count = 1
    """Interval n of blocks with experts: every n-th block has experts, beginning with index n - 1."""
    mlp_only_layers: tuple[Annotated[int, Field(ge=0, le=2**16)], ...] = Field(default=(), strict=False)
    """Indices of blocks without experts, from 0."""

    @property
    def mixture(self) -> MoeShape:
        """Shape of the mixture of experts."""
        return MoeShape(
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            expert_size=self.moe_intermediate_size,
            aux_loss_coef=self.router_aux_loss_coef,
            is_normalized=self.norm_topk_prob,
        )

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices of blocks without experts."""
        layers, step = range(self.num_hidden_layers), self.decoder_sparse_step
        return tuple(layer for layer in layers if layer in self.mlp_only_layers or (layer + 1) % step)

    @model_validator(mode="after")
    def _some_experts(self) -> Qwen3MoeConfig:
        if len(self.dense_layers) == self.num_hidden_layers:
            raise ValueError(
                f"no block has experts: mlp_only_layers={list(self.mlp_only_layers)} and decoder_sparse_step="
                f"{self.decoder_sparse_step} leave none of {self.num_hidden_layers}; lower decoder_sparse_step, or use "
                "the family qwen3"
            )
        return self
