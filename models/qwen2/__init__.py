"""Model family Qwen2: Qwen2 and Qwen2.5 (dense, text).

Source: Yang et al. 2024 (arXiv:2407.10671); Qwen Team 2024 (arXiv:2412.15115).
"""

from __future__ import annotations

from nxtrain_models.decoder import SwitchedWindowFamily
from nxtrain_models.qwen2.config import Qwen2Config
from nxtrain_models.qwen2.presets import PRESETS


class Qwen2(SwitchedWindowFamily):
    """Model family Qwen2, whose projections to queries, keys and values have biases."""

    name = "qwen2"
    config_type = Qwen2Config
    presets = PRESETS
    architecture = "Qwen2ForCausalLM"


FAMILY = Qwen2()
