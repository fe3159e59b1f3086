"""Continue a text with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from nxtrain.backends import choose, open_backend
from nxtrain.checkpoint import layout
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.mirror import resolve
from nxtrain.checkpoint.model import open_model
from nxtrain.checkpoint.places import content_of
from nxtrain.data.tokenization import END_OF_TEXT
from nxtrain.errors import ConfigError


def generate(
    checkpoint: Path | str, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """Sample a continuation; the whole text is computed again for each token.

    Args:
        checkpoint: A checkpoint, or a run folder; or its address in S3.
        prompt: Text to continue.
        max_new_tokens: Tokens to add; fewer if the text ends.
        temperature: Divides the scores; 0 takes the likeliest token.
        top_k: Choose among so many likeliest tokens; 0: all.
        seed: Start of the randomness.

    Returns:
        The prompt and its continuation.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        ConfigError: It carries no tokenizer.
    """
    place = resolve(checkpoint)
    file = place / layout.TOKENIZER
    if not file.is_file():
        raise ConfigError(f"{place} carries no {layout.TOKENIZER}: it was trained on token ids alone")
    tokenizer = Tokenizer.from_buffer(content_of(file))
    ids = tokenizer.encode(prompt).ids
    backend = open_backend(choose("auto")[0])
    model = open_model(place, backend, seq_len=max(1, len(ids)) + max_new_tokens)
    end = tokenizer.token_to_id(read_meta(place).end_of_text or END_OF_TEXT)
    if not ids:
        raise ConfigError("--prompt is empty; give at least one character to continue")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            scores = model.logits(backend.put(torch.tensor([ids])))[0, -1].cpu()
        token = _sample(scores, temperature, top_k, generator)
        if token == end:
            break
        ids.append(token)
    return tokenizer.decode(ids)


def _sample(scores: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(scores.argmax())
    if top_k:
        best = scores.topk(min(top_k, scores.numel()))
        return int(best.indices[torch.multinomial((best.values / temperature).softmax(0), 1, generator=generator)])
    return int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator))
