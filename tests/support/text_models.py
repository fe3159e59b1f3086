"""Hugging Face folders of small models that nothing trained, with tokenizers of their size."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from nxtrain.checkpoint import directory
from nxtrain.data.tokenization import train_bpe
from nxtrain.tools.eval.generate import GenerateRequest, Sampling, generate
from tests.support.models import hf_model, plan

LENGTH = 64
"""Longest sequence of the models."""

TEXT = "na\xefve caf\xe9 \u4f60\u597d, \u4e16\u754c \U0001f642 the quick brown fox "


DRAWN_FAMILIES = ("drawn-llama", "drawn-mistral", "drawn-qwen2", "drawn-qwen3")
"""Shapes of `text_model` whose sizes are drawn, one of each family."""


def text_model(folder: Path, shape: str = "gqa2") -> Path:
    """Write a model with 300 entries of vocabulary; a shape of `SHAPES` or `DRAWN_FAMILIES`."""
    config: dict[str, Any] = {"vocab_size": 300}
    family = shape.removeprefix("drawn-")
    drawn = shape in DRAWN_FAMILIES
    if drawn:
        config |= _sizes(Random(shape))
    model = {"family": family if drawn else "llama", "config": config}
    hf_model(plan("gqa2" if drawn else shape, model=model), std=0.3).save_pretrained(folder)
    train_bpe([TEXT * 50], 300, folder / directory.TOKENIZER)
    return folder


def _sizes(rng: Random) -> dict[str, Any]:
    heads = rng.choice((2, 3, 4, 6))
    return {
        "hidden_size": heads * rng.randint(8, 20),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": 2 * rng.randint(4, 12),
        "intermediate_size": rng.randint(20, 120),
        "num_hidden_layers": rng.randint(1, 3),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def continued(place: Path, prompt: str, count: int, sampling: Sampling, seed: int = 0) -> str:
    """A prompt and its continuation by the model of a place."""
    _, (text,) = generate(str(place), GenerateRequest((prompt,), count, seed), sampling)
    return text.prompt + text.text
