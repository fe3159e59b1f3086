"""The Llama family: shapes, presets, Hugging Face form; model code is imported only when a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from nxtrain.errors import Problem
from nxtrain.family import BuildContext, Decoder, ModelConfig, ModelFamily
from nxtrain.stages import LayerCosts
from nxtrain_models.llama import config as shape
from nxtrain_models.llama import hf
from nxtrain_models.llama.config import LlamaConfig
from nxtrain_models.llama.presets import PRESETS

if TYPE_CHECKING:
    from torch import nn


class Llama(ModelFamily):
    """Llama 2, 3, 3.1 and 3.2 (text)."""

    name = "llama"
    config_type = LlamaConfig
    presets = PRESETS

    def check(self, config: ModelConfig, *, tp: int, seq_len: int) -> list[Problem]:
        """Every reason why this shape cannot run at these degrees."""
        return shape.check(cast(LlamaConfig, config), tp=tp, seq_len=seq_len)

    def build(self, config: ModelConfig, context: BuildContext) -> nn.Module:
        """Make the module on the meta device."""
        from nxtrain_models.llama.model import build  # torch loads here, not when a config is checked

        return build(cast(LlamaConfig, config), context)

    def from_hf(self, hf_config: Mapping[str, Any]) -> LlamaConfig:
        """Read a Hugging Face `config.json`."""
        return hf.from_hf(hf_config)

    def to_hf(self, config: ModelConfig, dtype: str) -> dict[str, Any]:
        """Write a Hugging Face `config.json`."""
        return hf.to_hf(cast(LlamaConfig, config), dtype)

    def heads(self, config: ModelConfig) -> tuple[int, int]:
        """Number of query heads, and the width of one."""
        llama = cast(LlamaConfig, config)
        return llama.num_attention_heads, llama.head_size

    def flops_per_token(self, config: ModelConfig, seq_len: int) -> int:
        """Floating point operations of forward and backward for one token.

        Two per matrix entry forward and four backward; attention's two products see half of the sequence on average.

        Source: Korthikanti et al. 2022 (arXiv:2205.05198) appendix A, with the causal half of the attention.
        """
        llama = cast(LlamaConfig, config)
        attention = llama.num_hidden_layers * llama.num_attention_heads * llama.head_size * seq_len
        return 6 * (llama.num_matmul_params + attention)

    def layer_costs(self, config: ModelConfig, seq_len: int) -> LayerCosts:
        """Cost of each layer's forward pass per token; an embedding lookup costs nothing."""
        llama = cast(LlamaConfig, config)
        attention = llama.num_attention_heads * llama.head_size * seq_len
        return LayerCosts(0, 2 * (llama.block_matmul_params + attention), 2 * llama.vocab_size * llama.hidden_size)

    def decoder(self, config: ModelConfig) -> Decoder:
        """Dimensions of the model, for predictions of memory and time."""
        llama = cast(LlamaConfig, config)
        return Decoder(
            vocab_size=llama.vocab_size,
            hidden_size=llama.hidden_size,
            num_layers=llama.num_hidden_layers,
            num_heads=llama.num_attention_heads,
            num_kv_heads=llama.num_kv_heads,
            head_size=llama.head_size,
            intermediate_size=llama.intermediate_size,
            tied=llama.tie_word_embeddings,
        )

    def num_params(self, config: ModelConfig) -> int:
        """Parameters of the model, a tied embedding counted once."""
        return cast(LlamaConfig, config).num_params


FAMILY = Llama()
