"""Mistral 7B and Mistral Nemo.

Source: Jiang et al. 2023 (arXiv:2310.06825).
"""

from __future__ import annotations

from typing import cast

from nxtrain.errors import Problem
from nxtrain.family import ModelConfig
from nxtrain_models.decoder import DecoderFamily
from nxtrain_models.mistral.config import MistralConfig
from nxtrain_models.mistral.presets import PRESETS


class Mistral(DecoderFamily):
    """Mistral, whose sequences may be no longer than its window: within the window, attention is plainly causal."""

    name = "mistral"
    config_type = MistralConfig
    presets = PRESETS
    architecture = "MistralForCausalLM"

    def check(self, config: ModelConfig, *, tp: int, seq_len: int) -> list[Problem]:
        problems = super().check(config, tp=tp, seq_len=seq_len)
        window = cast(MistralConfig, config).sliding_window
        if window is not None and seq_len > window:
            reason = (
                f"seq_len={seq_len} exceeds model.config.sliding_window={window}, and no kernel cuts attention there"
            )
            hint = (
                f"shorten train.seq_len to {window} or less, where the window changes nothing; or raise "
                "model.config.sliding_window to train a model that sees the whole sequence"
            )
            problems.append(Problem("train.seq_len", reason, hint=hint))
        return problems


FAMILY = Mistral()
