"""Configuration of a decoder model with Hugging Face's names, and its checks.

Importable without torch, so any machine can check and plan a run.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator, model_validator

from nxtrain.common.dimensions import MoeShape
from nxtrain.common.errors import Problem
from nxtrain.common.family import ModelConfig
from nxtrain.common.mesh import divisors
from nxtrain.common.text import listed
from nxtrain.nn.rope_scaling import DynamicScaling, RopeScaling, YarnScaling, read_scaling

Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0, le=3.4e38)]  # these values are combined with float32 numbers


class DecoderConfig(ModelConfig):
    """Configuration of a decoder model; names and defaults are Hugging Face's, but sizes have no default.

    A family has a subclass with the defaults of its class in transformers.

    Attributes:
        qkv_bias: The projections to queries, keys and values have biases.
        head_norms: Every query and key head is normalized before its rotary embedding.
        out_bias: The output projection of attention has a bias.
        sinks: Each query head has an attention sink, a score without a key in its softmax.
    """

    qkv_bias: ClassVar[bool] = False
    head_norms: ClassVar[bool] = False
    out_bias: ClassVar[bool] = False
    sinks: ClassVar[bool] = False

    vocab_size: Count
    """Size of the vocabulary, without padding."""
    hidden_size: Count
    """Width of the residual stream."""
    num_hidden_layers: Annotated[int, Field(gt=0, le=2**16)]
    """Number of transformer blocks."""
    intermediate_size: Count
    """Intermediate size of the feed-forward layer."""
    num_attention_heads: Count
    """Number of query heads."""
    num_key_value_heads: Count | None = None
    """Number of key/value heads; None for the number of query heads. Code reads `num_kv_heads`."""
    head_dim: Count | None = None
    """Size of an attention head; None for hidden_size / num_attention_heads. Code reads `head_size`."""
    rms_norm_eps: Positive = 1e-6
    """Epsilon of RMS norm, added to the mean square before its root."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary position embedding for long contexts."""
    max_position_embeddings: Count = 2048
    """Longest sequence in tokens, unless rope_scaling extends it."""
    initializer_range: Positive = 0.02
    """Standard deviation of initial weight matrices."""

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Size of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def mixture(self) -> MoeShape | None:
        """Shape of the mixture of experts; None if every block has one feed-forward layer."""
        return None

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices of blocks without experts, in a model whose other blocks have experts."""
        return ()

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, including the query's own; None for full causal attention."""
        return None

    @property
    def scaled_length(self) -> int:
        """Longest sequence, in tokens, that the rotary embedding supports."""
        if self.rope_scaling is None:
            return self.max_position_embeddings
        return self.rope_scaling.longest(self.max_position_embeddings)

    @property
    def longest_sequence(self) -> tuple[str, int]:
        """Name of the key that limits the sequence length, and the limit in tokens."""
        if self.scaled_length > self.max_position_embeddings:
            return "original length * rope_scaling.factor", self.scaled_length
        return super().longest_sequence

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _of_its_type(cls, table: object) -> object:
        if table is None or isinstance(table, RopeScaling):
            return table
        return read_scaling(table)

    @model_validator(mode="after")
    def _consistent(self) -> DecoderConfig:
        heads = self.num_attention_heads
        kv_heads = self.num_kv_heads
        hidden = self.hidden_size
        reasons = []
        if heads % kv_heads:
            works = listed(divisors(heads))
            reasons.append(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}; use {works}")
        if self.head_dim is None and hidden % heads:
            reasons.append(f"num_attention_heads={heads} does not divide hidden_size={hidden}; set head_dim")
        elif self.head_size % 2:
            reasons.append(f"heads of width {self.head_size} cannot be rotated in pairs; the width must be even")
        elif isinstance(self.rope_scaling, DynamicScaling) and self.head_size // 2 == 1:
            reasons.append("heads of width 2 have one wavelength, which rope_type=dynamic cannot scale")
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            reasons.append(f"rope_theta={self.rope_theta} must exceed 1 for rope_type=yarn")
        if reasons:
            raise ValueError("; ".join(reasons))
        return self


def check(config: DecoderConfig, *, tp: int, seq_len: int) -> list[Problem]:
    """Return all problems of a model configuration at a tensor parallel degree and a sequence length."""
    heads, kv_heads = config.num_attention_heads, config.num_kv_heads
    fitting = listed([n for n in divisors(heads) if _divides(n, kv_heads)])
    problems = []
    if heads % tp:
        problems.append(
            Problem(
                "parallel.tp",
                f"tp={tp} does not divide model.config.num_attention_heads={heads}",
                hint=f"use {fitting}",
            )
        )
    elif not _divides(tp, kv_heads):
        reason = f"neither of tp={tp} and model.config.num_key_value_heads={kv_heads} divides the other"
        problems.append(Problem("parallel.tp", reason, hint=f"use {fitting}"))
    length, scaling = config.max_position_embeddings, config.rope_scaling
    if seq_len > config.scaled_length:
        reason = f"seq_len={seq_len} exceeds model.config.max_position_embeddings={length}"
        hint = "shorten train.seq_len, or raise model.config.max_position_embeddings"
        if scaling is None:
            hint = f"{hint}, or extend the model's length with model.config.rope_scaling"
        elif config.scaled_length > length:
            extended = f"{config.scaled_length}, the original length times model.config.rope_scaling.factor"
            reason = f"seq_len={seq_len} exceeds {extended}={scaling.factor}"
            hint = "shorten train.seq_len, or raise model.config.rope_scaling.factor"
        problems.append(Problem("train.seq_len", reason, hint=hint))
    return problems


def _divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0
