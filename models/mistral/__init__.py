"""Mistral 7B and Mistral Nemo.

Source: Jiang et al. 2023 (arXiv:2310.06825).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from nxtrain.errors import ConfigError, Problem
from nxtrain.family import BuildContext, ModelConfig
from nxtrain_models.decoder import DecoderFamily
from nxtrain_models.mistral.config import MistralConfig
from nxtrain_models.mistral.presets import PRESETS

if TYPE_CHECKING:
    from torch import nn


class Mistral(DecoderFamily):
    """Mistral, whose sequences may be no longer than its window: within the window, attention is plainly causal."""

    name = "mistral"
    config_type = MistralConfig
    presets = PRESETS
    architecture = "MistralForCausalLM"

    def check(self, config: ModelConfig, *, tp: int, seq_len: int) -> list[Problem]:
        return [*super().check(config, tp=tp, seq_len=seq_len), *_beyond_window(cast(MistralConfig, config), seq_len)]

    def build(self, config: ModelConfig, context: BuildContext) -> nn.Module:
        if problems := _beyond_window(cast(MistralConfig, config), context.seq_len):
            raise ConfigError(problems)
        return super().build(config, context)


def _beyond_window(config: MistralConfig, seq_len: int) -> list[Problem]:
    window = config.sliding_window
    if window is None or seq_len <= window:
        return []
    reason = f"seq_len={seq_len} exceeds model.config.sliding_window={window}, and no kernel cuts attention there"
    hint = (
        f"shorten sequences to {window} tokens, within which the window changes nothing; or raise "
        "model.config.sliding_window for a model that sees the whole sequence"
    )
    return [Problem("train.seq_len", reason, hint=hint)]


FAMILY = Mistral()
