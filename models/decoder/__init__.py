"""Decoder blocks shared by all model families; a family is a subclass of `DecoderFamily`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from nxtrain.common.dimensions import Dimensions
from nxtrain.common.errors import Problem
from nxtrain.common.family import BuildContext, ModelConfig, ModelFamily
from nxtrain_models.decoder import config as shape
from nxtrain_models.decoder import hf
from nxtrain_models.decoder.config import DecoderConfig
from nxtrain_models.decoder.window import with_switch, without_unused_window

if TYPE_CHECKING:
    from torch import nn


class DecoderFamily(ModelFamily):
    """Model family whose models are a `CausalDecoder`; model code is imported only when a model is built.

    Attributes:
        config_type: Configuration class, whose class attributes declare optional parts of a block.
        architecture: Name of the model class in transformers.
        fixed: Keys of `config.json` with their only supported value, which is also transformers' default.
    """

    config_type: type[DecoderConfig]
    architecture: str
    fixed: ClassVar[Mapping[str, object]] = {}

    def check(self, config: ModelConfig, *, tp: int, seq_len: int) -> list[Problem]:
        """Return all problems of a model configuration at a tensor parallel degree and a sequence length."""
        return shape.check(cast(DecoderConfig, config), tp=tp, seq_len=seq_len)

    def build(self, config: ModelConfig, context: BuildContext) -> nn.Module:
        """Build the model on the meta device."""
        from nxtrain_models.decoder.model import build  # torch loads here, not when a config is checked

        return build(cast(DecoderConfig, config), context)

    def from_hf(self, hf_config: Mapping[str, Any]) -> DecoderConfig:
        """Convert a Hugging Face `config.json` to the configuration of the family."""
        return hf.from_hf(self.config_type, self._fixed, hf_config)

    def to_hf(self, config: ModelConfig, dtype: str) -> dict[str, Any]:
        """Convert a configuration to a Hugging Face `config.json`."""
        return hf.to_hf(cast(DecoderConfig, config), self._fixed, self.architecture, dtype)

    def dimensions(self, config: ModelConfig) -> Dimensions:
        """Return the dimensions of a model, for plans and parallel layouts."""
        decoder = cast(DecoderConfig, config)
        windows = [decoder.window_of(layer) for layer in range(decoder.num_hidden_layers)]
        full_layers = full_period = 0
        if windows[-1] is not None or windows[0] is not None:
            full_layers = windows.count(None)
        if windows[0] is not None and full_layers:  # each second layer
            full_layers, full_period = 0, 2
        return Dimensions(
            vocab_size=decoder.vocab_size,
            hidden_size=decoder.hidden_size,
            num_layers=decoder.num_hidden_layers,
            num_heads=decoder.num_attention_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_size=decoder.head_size,
            intermediate_size=decoder.intermediate_size,
            tied=decoder.tie_word_embeddings,
            qkv_bias=decoder.qkv_bias,
            head_norms=decoder.head_norms,
            window=windows[-1] or windows[0],
            full_layers=full_layers,
            full_period=full_period,
            out_bias=decoder.out_bias,
            sinks=decoder.sinks,
            mixture=decoder.mixture,
            dense_layers=decoder.dense_layers,
        )

    @property
    def _fixed(self) -> dict[str, object]:
        return {"model_type": self.name, "hidden_act": "silu", "attention_dropout": 0.0, **self.fixed}


class SwitchedWindowFamily(DecoderFamily):
    """Model family whose `config.json` enables sliding windows by `use_sliding_window`."""

    def from_hf(self, hf_config: Mapping[str, Any]) -> DecoderConfig:
        """Convert a Hugging Face `config.json` to the configuration of the family."""
        return super().from_hf(without_unused_window(hf_config))

    def to_hf(self, config: ModelConfig, dtype: str) -> dict[str, Any]:
        """Convert a configuration to a Hugging Face `config.json`, with `use_sliding_window`."""
        return with_switch(super().to_hf(config, dtype))
