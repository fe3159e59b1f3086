"""Model family Qwen3 (dense).

Source: Qwen Team 2025 (arXiv:2505.09388).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nxtrain_models.decoder import SwitchedWindowFamily
from nxtrain_models.qwen3.config import Qwen3Config
from nxtrain_models.qwen3.presets import PRESETS


class Qwen3(SwitchedWindowFamily):
    """Model family Qwen3, which normalizes every query and key head."""

    name = "qwen3"
    config_type = Qwen3Config
    presets = PRESETS
    architecture = "Qwen3ForCausalLM"
    fixed: ClassVar[Mapping[str, object]] = {"attention_bias": False}


FAMILY = Qwen3()
