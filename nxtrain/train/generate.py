"""Continue a text with the weights of a checkpoint, or of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from nxtrain.backends import choose, open_backend
from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.mirror import locate_checkpoint
from nxtrain.convert.hf_folder import CONFIG
from nxtrain.convert.verify_export import open_hf_model, open_model
from nxtrain.data.tokenization import end_ids
from nxtrain.errors import ConfigError, DamagedError, DivergedError
from nxtrain.family import CausalLM, ModelConfig, find_family
from nxtrain.io.object_store import Location, content_of, place_of
from nxtrain.nn.decoding import Decoder
from nxtrain.train.text_stream import Detokenizer, Stops


def generate(
    address: str,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stops: Sequence[str] = (),
    note: Callable[[str], None] = lambda line: None,
) -> Iterator[str]:
    """Sample a continuation token by token.

    Args:
        address: A checkpoint, a run folder, a mirror or its address in S3, or a Hugging Face folder.
        prompt: Text to continue.
        max_new_tokens: Tokens to add; fewer if the text ends or reaches the model's length.
        sampling: Rule by which each token is drawn.
        seed: Seed of the random generator.
        stops: Stop texts; the continuation ends before the first one found.
        note: Prints a line for the user.

    Yields:
        The prompt and its continuation in pieces of whole characters.

    Raises:
        CheckpointError: The checkpoint is absent or damaged.
        ConfigError: The checkpoint carries no tokenizer, or the prompt does not fit the model.
        DivergedError: The model's scores are not finite.
    """
    if not prompt or "" in stops:
        raise ConfigError(f"{'--stop' if prompt else '--prompt'} is empty; give at least one character")
    _refuse_surrogates(prompt, *stops)
    place = place_of(address)
    is_hf = isinstance(place, Path) and _is_hf_folder(place)
    place = place if is_hf else locate_checkpoint(address)
    tokenizer = _open_tokenizer(place)
    config, ends = _shape(place, is_hf, tokenizer)
    ids = tokenizer.encode(prompt).ids
    limit, length = config.longest_sequence
    room = length - len(ids)
    _refuse_misfit(ids, config, room)
    count = min(max_new_tokens, room)
    backend = open_backend(choose("auto")[0])
    decoder = Decoder(_open(place, is_hf, backend, len(ids) + count), backend.put)
    generator = torch.Generator().manual_seed(seed)
    text, stop = Detokenizer(tokenizer), Stops(stops)
    yield text.add(ids)
    scores = decoder.scores(ids)
    ends |= end_ids(tokenizer)
    for number in range(count):
        token = sampling.draw(scores, generator)
        if token in ends:
            break
        yield stop.add(text.add([token]))
        if stop.found:
            return
        if number + 1 < count:
            scores = decoder.scores([token])
    else:
        if count < max_new_tokens:
            note(f"stopped at the model's length: {limit}={length} tokens")
    yield stop.add(text.rest()) + ("" if stop.found else stop.rest())


def _open(place: Location, is_hf: bool, backend: Backend, seq_len: int) -> CausalLM:
    if is_hf:
        assert isinstance(place, Path)
        return open_hf_model(place, backend, seq_len)
    return open_model(place, backend, seq_len)


def _is_hf_folder(place: Path) -> bool:
    try:
        return (place / CONFIG).is_file() and not directory.is_checkpoint(place)
    except OSError:  # reported by the code that reads the folder
        return False


def _open_tokenizer(place: Location) -> Tokenizer:
    file = place / directory.TOKENIZER
    if not file.is_file():
        hint = "generate continues text and needs one; save one there, or train with data.tokenizer=PATH"
        raise ConfigError(f"{place} carries no {directory.TOKENIZER}: {hint}")
    try:
        tokenizer = Tokenizer.from_buffer(content_of(file))
    except OSError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise DamagedError(f"{file}", f"it is no tokenizer of Hugging Face: {error}") from error
    # A tokenizer file may configure the truncation and padding of the task for which it was made.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _shape(place: Location, is_hf: bool, tokenizer: Tokenizer) -> tuple[ModelConfig, frozenset[int]]:
    """Shape of the model, and the end-of-text ids that the checkpoint or the Hugging Face folder declares."""
    if not is_hf:
        meta = read_meta(place)
        end = tokenizer.token_to_id(meta.end_of_text) if meta.end_of_text else None
        return meta.model()[1], frozenset() if end is None else frozenset({end})
    try:
        content = json.loads(content_of(place / CONFIG))
        family, declared = find_family(str(content["model_type"])), content.get("eos_token_id")
        listed = declared if isinstance(declared, list) else [declared]
        return family.from_hf(content), frozenset(token for token in listed if isinstance(token, int))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{place / CONFIG} is no configuration of a model: {error!r}") from error


def _refuse_surrogates(*texts: str) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = f"at character {error.start}"
            raise ConfigError(f"--prompt and --stop take UTF-8 text, and {text[:40]!a} is none {at}") from error


def _refuse_misfit(ids: Sequence[int], config: ModelConfig, room: int) -> None:
    if not ids:
        raise ConfigError("--prompt has no token in the model's vocabulary; give another text to continue")
    if room <= 0:
        limit, length = config.longest_sequence
        raise ConfigError(
            f"--prompt has {len(ids):,} tokens, and the model's length is {limit}={length:,} with what is added; "
            f"shorten the prompt by {1 - room:,} tokens or more"
        )
    if max(ids) >= config.vocab_size:
        reason = f"its tokenizer gives ids up to {max(ids)}, and its vocabulary ends at {config.vocab_size - 1}"
        raise ConfigError(f"the tokenizer does not belong to the model: {reason}")


@dataclass(frozen=True)
class Sampling:
    """Rule by which tokens are drawn.

    Args:
        temperature: Divides the scores; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to choose among; 0: all.
        top_p: Joint probability of the likeliest tokens to choose among; 1: all.

    Source: Holtzman et al. 2020 (arXiv:1904.09751) section 3.1, for top_p.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0

    def draw(self, scores: Tensor, generator: torch.Generator) -> int:
        """Choose a token.

        Args:
            scores: (V,) of the vocabulary.
            generator: Random generator of the draw.

        Raises:
            DivergedError: Scores are not finite.
        """
        if not bool(torch.isfinite(scores).all()):
            raise DivergedError("the model's scores are not finite: its weights diverged; take an earlier checkpoint")
        if self.temperature == 0:
            return int(scores.argmax())
        best, tokens = scores.double().topk(min(self.top_k or scores.numel(), scores.numel()))
        # Subtract the best score first: dividing by a temperature near 0 would overflow.
        chances = ((best - best[0]) / self.temperature).softmax(0)
        before = chances.cumsum(0) - chances
        chances = torch.where(before < self.top_p, chances, 0.0)
        return int(tokens[torch.multinomial(chances, 1, generator=generator)])
