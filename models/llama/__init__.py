"""Model family Llama: Llama 2, 3, 3.1, 3.2 (text) and 3.3.

Source: Touvron et al. 2023 (arXiv:2307.09288); Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nxtrain_models.decoder import DecoderFamily
from nxtrain_models.llama.config import LlamaConfig
from nxtrain_models.llama.presets import PRESETS


class Llama(DecoderFamily):
    """Model family Llama, whose blocks have no biases, and no norms of query and key heads."""

    name = "llama"
    config_type = LlamaConfig
    presets = PRESETS
    architecture = "LlamaForCausalLM"
    fixed: ClassVar[Mapping[str, object]] = {"attention_bias": False, "mlp_bias": False}


FAMILY = Llama()
