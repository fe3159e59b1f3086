"""Shape of a gpt-oss."""

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
"""Scaling of the rotary wavelengths of the published models, the default of transformers."""


class GptOssConfig(MixtureConfig):
    """Shape of a gpt-oss, as `GptOssConfig` of transformers; the first of two layers has a window, the second none."""

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
    """Experts of a block; intermediate_size is the width inside of each."""
    swiglu_limit: Positive = 7.0
    """Largest gate, and largest absolute value beside it."""
    swiglu_alpha: Positive = 1.702
    """Factor inside of the sigmoid of the gate."""

    @property
    def mixture(self) -> MoeShape:
        """Experts of the blocks."""
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
        """Tokens that a query of a layer sees, its own among them; None for all before it."""
        return None if layer % 2 else self.sliding_window
