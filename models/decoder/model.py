"""Decoder model with RMS norms, rotary attention and gated feed-forward layers, for all families and backends.

Shapes: S sequence, B batch, D hidden, V vocabulary. Between layers activations are (S, B, D), or (S / tp, B, D) with
sequence parallelism. The sharded dimension is the first, so gathering it needs no additional copy.

Source: Touvron et al. 2023 (arXiv:2302.13971), whose blocks the later families share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from nxtrain.common.family import BuildContext
from nxtrain.common.sharding import Init, ShardSpec
from nxtrain.common.stages import StagePart
from nxtrain.nn.attention import Attention, Heads
from nxtrain.nn.mixture import MixtureOfExperts, load_of
from nxtrain.nn.mlp import GatedMLP
from nxtrain.nn.norm import RMSNorm
from nxtrain.nn.rope import Rope
from nxtrain_models.decoder.config import DecoderConfig


class _AttentionBlock(nn.Module):
    """Base of transformer blocks: attention after a norm, and the norm before the feed-forward layer."""

    def __init__(self, config: DecoderConfig, context: BuildContext, index: int) -> None:
        super().__init__()
        init, init_out = _inits(config, context)
        heads = Heads(
            config.num_attention_heads,
            config.num_kv_heads,
            config.head_size,
            bias=config.qkv_bias,
            norm_eps=config.rms_norm_eps if config.head_norms else None,
            window=config.window_of(index),
            out_bias=config.out_bias,
            sinks=config.sinks,
        )
        self.input_layernorm = _norm(config, context)
        self.self_attn = Attention(config.hidden_size, heads, init=init, init_out=init_out, context=context)
        self.post_attention_layernorm = _norm(config, context)

    def attended(self, x: Tensor, rope: Rope, *documents: Tensor) -> Tensor:
        """Add attention to the residual stream: (S/tp, B, D) to (S/tp, B, D)."""
        return x + self.self_attn(self.input_layernorm(x), rope, *documents)  # type: ignore[no-any-return]


class DecoderBlock(_AttentionBlock):
    """Transformer block: attention and a feed-forward layer, each after a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, context: BuildContext, index: int) -> None:
        super().__init__(config, context, index)
        init, init_out = _inits(config, context)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, init=init, init_out=init_out, context=context)

    def forward(self, x: Tensor, rope: Rope, *documents: Tensor) -> Tensor:
        """Compute the block: (S/tp, B, D) to (S/tp, B, D).

        Args:
            x: Residual stream.
            rope: Rotary position embedding.
            documents: `starts` of `CausalLM.loss` if documents are separate; otherwise nothing.
        """
        x = self.attended(x, rope, *documents)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class MixtureBlock(_AttentionBlock):
    """Transformer block: attention and a mixture of experts, each after a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, context: BuildContext, index: int) -> None:
        super().__init__(config, context, index)
        init, init_out = _inits(config, context)
        mixture = config.mixture
        assert mixture is not None, "the block has experts"
        experts = MixtureOfExperts(config.hidden_size, mixture, init=init, init_out=init_out, context=context)
        self.add_module(mixture.module, experts)
        self._name = mixture.module

    def forward(
        self, x: Tensor, rope: Rope, starts: Tensor | None = None, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the block, (S/tp, B, D) to (S/tp, B, D), and its routing statistics.

        `starts` and `counted` are arguments of `CausalLM.loss`.
        """
        x = self.attended(x, rope, *_given(starts))
        out, routing = getattr(self, self._name)(self.post_attention_layernorm(x), *_given(counted))
        return x + out, routing


class DecoderBody(nn.Module):
    """Decoder without the output projection: embedding, blocks and final norm; named `model` in checkpoints."""

    def __init__(self, config: DecoderConfig, context: BuildContext, parts: Sequence[StagePart]) -> None:
        super().__init__()
        init, _ = _inits(config, context)
        if any(part.first for part in parts):
            self.embed_tokens = context.layers.embedding(config.vocab_size, config.hidden_size, init)
        # Blocks are named by their index in the whole model, for any pipeline stage.
        blocks = chain.from_iterable(part.blocks for part in parts)
        self.layers = nn.ModuleDict({str(i): _block(config, context, i) for i in blocks})
        if any(part.last for part in parts):
            self.norm = _norm(config, context)
        positions = None
        if context.context_parallel is not None:
            positions = context.context_parallel.positions
        self.rope = Rope(
            context.seq_len,
            config.head_size,
            config.rope_theta,
            config.rope_scaling,
            context.kernels,
            original_length=config.max_position_embeddings,
            positions=positions,
        )
        self.loads: Tensor | None = None

    def forward(
        self,
        x: Tensor,
        part: StagePart,
        starts: Tensor | None = None,
        counted: Tensor | None = None,
        routing: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a pipeline part: (S, B) tokens for the first part, (S/tp, B, D) for others, to (S/tp, B, D).

        The returned routing statistics are sums over all blocks so far; None before the first block with experts.
        """
        if part.first:
            x = self.embed_tokens(x)
        documents = _given(starts)
        of_mixtures = documents if counted is None else (starts, counted)
        loads: dict[int, Tensor] = {}
        for index in part.blocks:
            block = self.layers[str(index)]
            if isinstance(block, MixtureBlock):
                x, own = block(x, self.rope, *of_mixtures)
                loads[index] = load_of(own)
                routing = own if routing is None else routing + own
            else:
                x = block(x, self.rope, *documents)
        if loads and self.loads is not None and torch.is_grad_enabled():
            blank = torch.zeros_like(self.loads[0])
            self.loads.add_(torch.stack([loads.get(index, blank) for index in range(len(self.loads))]))
        return self.norm(x) if part.last else x, routing


class CausalDecoder(nn.Module):
    """Decoder with output projection and loss; parameters have the names of the same family in transformers."""

    def __init__(self, config: DecoderConfig, context: BuildContext) -> None:
        super().__init__()
        init, _ = _inits(config, context)
        self._whole = StagePart(range(config.num_hidden_layers), first=True, last=True)
        parts = context.parts or (self._whole,)
        self.model = DecoderBody(config, context, parts)
        self._router_losses = context.router_losses
        self.routing: Tensor | None = None
        self._num_experts = 0 if config.mixture is None else config.mixture.num_experts
        if any(part.last for part in parts):
            self.lm_head = context.layers.head(config.vocab_size, config.hidden_size, init)
        if config.tie_word_embeddings:
            self._tie()

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Transformer blocks of this pipeline stage, in order."""
        return tuple(self.model.layers.values())

    def count_loads(self, loads: Tensor) -> None:
        """Accumulate the loads of the experts in a tensor; see `CausalLM.count_loads`."""
        self.model.loads = loads

    def run(
        self,
        part: StagePart,
        state: Sequence[Tensor],
        targets: Tensor | None = None,
        starts: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Sequence[Tensor]:
        """Compute one pipeline part of the model; see `CausalLM.run`."""
        x, *before = state
        routing = before[0] if before else None
        hidden, routing = self.model(x.t() if part.first else x, part, starts, counted, routing)
        if targets is not None:
            return (self._loss(hidden, routing, targets),)
        if self._num_experts == 0:
            return (hidden,)
        if routing is None:
            routing = torch.zeros(2 * self._num_experts + 4, device=hidden.device)
        return hidden, routing

    def loss(
        self, inputs: Tensor, targets: Tensor, starts: Tensor | None = None, counted: Tensor | None = None
    ) -> Tensor:
        """Sum of the cross entropies of all tokens, for a model without pipeline stages; see `CausalLM.loss`."""
        hidden, routing = self.model(inputs.t(), self._whole, starts, counted)
        return self._loss(hidden, routing, targets)

    def logits(self, inputs: Tensor, starts: Tensor | None = None) -> Tensor:
        """Logits (B, S, V) float32 of tokens (B, S), for a model without pipeline stages; see `CausalLM.logits`."""
        hidden, _ = self.model(inputs.t(), self._whole, starts)
        return self.lm_head.logits(hidden).transpose(0, 1)

    def _loss(self, hidden: Tensor, routing: Tensor | None, targets: Tensor) -> Tensor:
        """Sum of the cross entropies of all tokens, with the gradient of the routers' losses added."""
        loss = self.lm_head.loss(hidden, targets.movedim(-1, 0))
        if routing is None or self._router_losses is None:
            return loss
        scale = None if self.lm_head.scale is None else self.lm_head.scale()
        loss, self.routing = self._router_losses.add_to(loss, routing, targets, scale)
        return loss

    def _tie(self) -> None:
        """Tie the output projection to the embedding: one parameter, or a synchronized copy on the last stage."""
        has_embedding, has_head = hasattr(self.model, "embed_tokens"), hasattr(self, "lm_head")
        if has_embedding and has_head:
            self.lm_head.weight = cast(nn.Parameter, self.model.embed_tokens.weight)
        elif has_embedding:
            specs = cast(dict[str, ShardSpec], self.model.embed_tokens.specs)
            specs["weight"] = replace(specs["weight"], has_copy=True)
        elif has_head:
            self.lm_head.specs["weight"] = replace(self.lm_head.specs["weight"], tied_to="model.embed_tokens.weight")


def build(config: DecoderConfig, context: BuildContext) -> CausalDecoder:
    """Build the model on the meta device."""
    with torch.device("meta"):
        return CausalDecoder(config, context)


def _given(x: Tensor | None) -> tuple[Tensor, ...]:
    """Return the tensor as optional positional argument of a module; empty for None."""
    return () if x is None else (x,)


def _block(config: DecoderConfig, context: BuildContext, index: int) -> nn.Module:
    if config.mixture is None or index in config.dense_layers:
        return DecoderBlock(config, context, index)
    return MixtureBlock(config, context, index)


def _inits(config: DecoderConfig, context: BuildContext) -> tuple[Init, Init]:
    """Initializations of projections, and of projections into the residual stream, which are smaller.

    The smaller values keep the variance of the residual stream from growing with depth.

    Source: Radford et al. 2019 (GPT-2) section 2.3.
    """
    std = config.initializer_range
    depth = math.sqrt(2 * config.num_hidden_layers) if context.scaled_init else 1.0
    return Init("normal", std), Init("normal", std / depth)


def _norm(config: DecoderConfig, context: BuildContext) -> RMSNorm:
    return RMSNorm(
        config.hidden_size,
        config.rms_norm_eps,
        kernels=context.kernels,
        partial_gradient=context.layers.sequence_parallel,
        dtype=context.dtype,
        decay=context.decay_norms,
    )
