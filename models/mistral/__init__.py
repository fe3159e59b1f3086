"""Model family Mistral: Mistral 7B and Mistral Nemo.

Source: Jiang et al. 2023 (arXiv:2310.06825).
"""

from __future__ import annotations

from nxtrain_models.decoder import DecoderFamily
from nxtrain_models.mistral.config import MistralConfig
from nxtrain_models.mistral.presets import PRESETS


class Mistral(DecoderFamily):
    """Model family Mistral, whose layers may have sliding-window attention."""

    name = "mistral"
    config_type = MistralConfig
    presets = PRESETS
    architecture = "MistralForCausalLM"


FAMILY = Mistral()
