"""Model family Mixtral: Mixtral 8x7B and 8x22B.

Source: Jiang et al. 2024 (arXiv:2401.04088).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nxtrain_models.decoder import DecoderFamily
from nxtrain_models.mixtral.config import MixtralConfig
from nxtrain_models.mixtral.presets import PRESETS


class Mixtral(DecoderFamily):
    """Model family Mixtral, whose blocks have a mixture of experts instead of one feed-forward layer."""

    name = "mixtral"
    config_type = MixtralConfig
    presets = PRESETS
    architecture = "MixtralForCausalLM"
    fixed: ClassVar[Mapping[str, object]] = {"router_jitter_noise": 0.0}


FAMILY = Mixtral()
