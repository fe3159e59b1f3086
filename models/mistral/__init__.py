"""Mistral 7B and Mistral Nemo.

Source: Jiang et al. 2023 (arXiv:2310.06825).
"""

from __future__ import annotations

from nxtrain_models.decoder import DecoderFamily
from nxtrain_models.mistral.config import MistralConfig
from nxtrain_models.mistral.presets import PRESETS


class Mistral(DecoderFamily):
    """Mistral, whose sequences may be no longer than its window."""

    name = "mistral"
    config_type = MistralConfig
    presets = PRESETS
    architecture = "MistralForCausalLM"


FAMILY = Mistral()
