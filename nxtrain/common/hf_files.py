"""Names of the files in a model folder in Hugging Face's format, some of which checkpoints have too."""

from __future__ import annotations

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

COMPANIONS = (GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", CHAT_TEMPLATE)
"""Files of a model folder other than `config.json` and the weights."""
