"""Hugging Face folders of small models that nothing trained, with tokenizers of their size."""

from __future__ import annotations

from pathlib import Path

from nxtrain.checkpoint import directory
from nxtrain.data.tokenization import train_bpe
from nxtrain.train.generate import Request, Sampling, generate
from tests.support.models import hf_model, plan

LENGTH = 64
"""Longest sequence of the models."""

TEXT = "na\xefve caf\xe9 \u4f60\u597d, \u4e16\u754c \U0001f642 the quick brown fox "


def text_model(folder: Path, shape: str = "gqa2") -> Path:
    """Write a model with 300 entries of vocabulary; a shape of `SHAPES`."""
    hf_model(plan(shape, model={"config": {"vocab_size": 300}}), std=0.3).save_pretrained(folder)
    train_bpe([TEXT * 50], 300, folder / directory.TOKENIZER)
    return folder


def continued(place: Path, prompt: str, count: int, sampling: Sampling, seed: int = 0) -> str:
    """A prompt and its continuation by the model of a place."""
    _, (text,) = generate(str(place), Request((prompt,), count, seed), sampling)
    return text.prompt + text.text
