"""Configuration of gpt-oss models."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from nxtrain.common.dimensions import MoeShape
from nxtrain.nn.rope_scaling import RopeScaling, YarnScaling
from nxtrain_models.decoder.config import Count, Positive
from nxtrain_models.decoder.mixture import MixtureConfig

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary embedding scaling of the published models, which is transformers' default."""


class GptOssConfig(MixtureConfig):
    """Configuration of a gpt-oss model, as `GptOssConfig` of transformers; even layers have a sliding window."""

    qkv_bias: ClassVar[bool] = True
    out_bias: ClassVar[bool] = True
    sinks: ClassVar[bool] = True

    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 64
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 150_000.0
    rope_scaling: RopeScaling | None = Field(default_factory=lambda: YarnScaling.model_validate(YARN))
    max_position_embeddings: Count = 131_072
    sliding_window: Count | None = 128
    num_experts_per_tok: Count = 4
    num_local_experts: Count = 128
    """Number of experts per block; intermediate_size is the width of one expert."""
    swiglu_limit: Positive = 7.0
    """Clamp of SwiGLU: upper limit of the gate, and limit of the absolute value of the up projection."""
    swiglu_alpha: Positive = 1.702
    """Factor of the gate inside its sigmoid."""

    @property
    def mixture(self) -> MoeShape:
        """Shape of the mixture of experts."""
        return MoeShape(
            num_experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            expert_size=self.intermediate_size,
            aux_loss_coef=self.router_aux_loss_coef,
            router="router",
            biases=True,
            limit=self.swiglu_limit,
            alpha=self.swiglu_alpha,
        )

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, including the query's own; None for full causal attention."""
        return None if layer % 2 else self.sliding_window
