"""Llama, written once for every backend.

Shapes: S sequence, B batch, D hidden, V vocabulary. Between the layers activations are (S, B, D), or (S / tp, B, D)
under sequence parallelism: the dimension that is cut comes first, so that gathering it copies nothing twice.

Source: Touvron et al. 2023 (arXiv:2302.13971, arXiv:2307.09288); Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from nxtrain.family import BuildContext
from nxtrain.nn.attention import Attention
from nxtrain.nn.mlp import GatedMLP
from nxtrain.nn.norm import RMSNorm
from nxtrain.nn.rope import Rope, RopeScaling
from nxtrain.sharding import Init
from nxtrain_models.llama.config import LlamaConfig


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each after a norm and beside the residual stream."""

    def __init__(self, config: LlamaConfig, context: BuildContext) -> None:
        super().__init__()
        init, init_out = _inits(config, context)
        self.input_layernorm = _norm(config, context)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_kv_heads,
            config.head_size,
            init=init,
            init_out=init_out,
            context=context,
        )
        self.post_attention_layernorm = _norm(config, context)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, init=init, init_out=init_out, context=context)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """(S/tp, B, D) to (S/tp, B, D)."""
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class LlamaBody(nn.Module):
    """Everything but the output projection; its name in checkpoints is `model`."""

    def __init__(self, config: LlamaConfig, context: BuildContext) -> None:
        super().__init__()
        init, _ = _inits(config, context)
        self.embed_tokens = context.layers.embedding(config.vocab_size, config.hidden_size, init)
        self.layers = nn.ModuleList(LlamaBlock(config, context) for _ in range(config.num_hidden_layers))
        self.norm = _norm(config, context)
        self.rope = Rope(context.seq_len, config.head_size, config.rope_theta, _scaling(config))

    def forward(self, tokens: Tensor) -> Tensor:
        """(S, B) tokens to (S/tp, B, D)."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.rope)
        return self.norm(x)  # type: ignore[no-any-return]


class LlamaForCausalLM(nn.Module):
    """Llama with its output projection and loss; parameters bear the names of transformers' class of this name."""

    def __init__(self, config: LlamaConfig, context: BuildContext) -> None:
        super().__init__()
        init, _ = _inits(config, context)
        self.model = LlamaBody(config, context)
        self.lm_head = context.layers.head(config.vocab_size, config.hidden_size, init)
        if config.tie_word_embeddings:
            self.lm_head.weight = cast(nn.Parameter, self.model.embed_tokens.weight)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks, in order of use."""
        return tuple(self.model.layers)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Weighted sum of the tokens' cross entropies: (B, S), (B, S), () to () float32."""
        return self.lm_head.loss(self.model(inputs.t()), targets.t())

    def logits(self, inputs: Tensor) -> Tensor:
        """(B, S) to (B, S, V) float32, whole on every rank; not differentiable."""
        return self.lm_head.logits(self.model(inputs.t())).transpose(0, 1)


def build(config: LlamaConfig, context: BuildContext) -> LlamaForCausalLM:
    """Make the model on the meta device."""
    with torch.device("meta"):
        return LlamaForCausalLM(config, context)


def _inits(config: LlamaConfig, context: BuildContext) -> tuple[Init, Init]:
    """How projections start, and those into the residual stream: smaller, so that depth does not grow its variance.

    Source: Radford et al. 2019 (GPT-2) section 2.3.
    """
    std = config.initializer_range
    depth = math.sqrt(2 * config.num_hidden_layers) if context.scaled_init else 1.0
    return Init("normal", std), Init("normal", std / depth)


def _norm(config: LlamaConfig, context: BuildContext) -> RMSNorm:
    return RMSNorm(
        config.hidden_size,
        config.rms_norm_eps,
        kernels=context.kernels,
        sequence_parallel=context.layers.sequence_parallel,
        dtype=context.dtype,
        decay=context.decay_norms,
    )


def _scaling(config: LlamaConfig) -> RopeScaling | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    return RopeScaling(
        scaling.factor,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
