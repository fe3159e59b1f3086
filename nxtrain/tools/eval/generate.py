"""Text generation with a checkpoint or Hugging Face folder, for one prompt or a batch of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from nxtrain.backends import choose, open_backend
from nxtrain.backends.base import Backend
from nxtrain.common.errors import ConfigError, DivergedError
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.progress import Progress
from nxtrain.nn.decoding import Decoder
from nxtrain.tools.eval.trained import Trained

Ending = Literal["", "end", "stop", "tokens", "length"]
"""Reason why a continuation ended; empty while it has not.

`end`: the model's end-of-text token. `stop`: a stop text. `tokens`: the requested number of tokens. `length`: the
model's maximum sequence length.
"""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters for the next token.

    Source: Holtzman et al. 2020 (arXiv:1904.09751) section 3.1, for top_p.
    """

    temperature: float = 0.8  # divides the logits; 0 takes the most likely token
    top_k: int = 50  # number of most likely tokens to sample from; 0: all
    top_p: float = 1.0  # joint probability of the most likely tokens to sample from; 1: all

    def draw(self, scores: Tensor, generator: torch.Generator) -> int:
        """Sample a token id from the logits (V,) of the vocabulary.

        Raises:
            DivergedError: A logit is not finite.
        """
        if not bool(torch.isfinite(scores).all()):
            raise DivergedError("the model's logits are not finite: its weights diverged; use an earlier checkpoint")
        if self.temperature == 0:
            return int(scores.argmax())
        best, tokens = scores.double().topk(min(self.top_k or scores.numel(), scores.numel()))
        # Subtract the best score first: dividing by a temperature near 0 would overflow.
        chances = ((best - best[0]) / self.temperature).softmax(0)
        if self.top_p < 1:  # the rounded sum of all but the rarest tokens may reach 1
            before = chances.cumsum(0) - chances
            chances = torch.where(before < self.top_p, chances, 0.0)
        return int(tokens[torch.multinomial(chances, 1, generator=generator)])


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded by a tokenizer from bytes that form no complete character


class Detokenizer:
    """Incremental detokenizer: turns a growing list of tokens into text, in pieces that never split a character.

    Tokens are decoded together with the tokens before them, since a text's first token may lose its leading space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._shown = 0

    def add(self, ids: Sequence[int], *, is_whole: bool = False) -> str:
        """Append tokens and return the newly completed characters.

        Args:
            is_whole: No further token belongs to the last character, which may be `_UNFINISHED` itself.
        """
        self._ids += ids
        text = self.rest()
        if not text or (text.endswith(_UNFINISHED) and not is_whole):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def rest(self) -> str:
        """Return the text after the completed characters."""
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        return str(self._tokenizer.decode(self._ids[self._context :])[len(before) :])


class Stops:
    """Filter that cuts a growing text before the first stop text.

    Attributes:
        has_ended: True once a stop text was found.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.has_ended = False

    def add(self, text: str) -> str:
        """Append generated text, and return the part of it that cannot begin a stop text.

        The rest is held back until more text follows. Text from a stop text on is dropped.
        """
        self._held += text
        starts = [self._held.find(stop) for stop in self._texts if stop in self._held]
        if starts:
            self._held = self._held[: min(starts)]
            self.has_ended = True
            return self.rest()
        longest = 0
        for stop in self._texts:
            for size in range(1, len(stop)):
                if self._held.endswith(stop[:size]):
                    longest = max(longest, size)
        safe = len(self._held) - longest
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown

    def rest(self) -> str:
        """Return the text that was held back because it might have begun a stop text."""
        shown, self._held = self._held, ""
        return shown


class Continuation:
    """Prompt and the text generated after it, token by token.

    The text ends after `count` tokens, at a token of `ends`, or before a stop text.

    Args:
        ids: Token ids of the prompt.
        count: Maximum number of tokens to add.
        ends: Ids of end-of-text tokens.
        stops: Stop texts.
        seed: Seed of this text's own random generator, so that its tokens do not depend on other texts.
        alone: The text begins as the tokenizer decodes its tokens without the prompt. Tokenizers like that of Llama 2
            then drop the space before the first word. Indentation by several spaces stays.
    """

    # 7 arguments: the prompt, what ends the text, and its form
    def __init__(
        self,
        ids: Sequence[int],
        count: int,
        tokenizer: Tokenizer,
        ends: frozenset[int] = frozenset(),
        *,
        stops: Sequence[str] = (),
        seed: int = 0,
        alone: bool = False,
    ) -> None:
        self.ids = tuple(ids)
        self.count = count
        self._ends, self._tokenizer = ends, tokenizer
        self._may_drop_space = alone
        self._detokenizer, self._stops = Detokenizer(tokenizer), Stops(stops)
        # Decoded text lacks special tokens, so that stop texts of this kind are found by their ids.
        added = tokenizer.get_added_tokens_decoder().items()
        self._stop_ids = {number for number, token in added if token.special and token.content in stops}
        self.generator = torch.Generator().manual_seed(seed)
        self.prompt = self._detokenizer.add(self.ids, is_whole=True)
        self.added: list[int] = []
        self.text = ""
        self.ending: Ending = ""

    def add(self, token: int) -> str:
        """Append a token, and return the text that the token completes."""
        if token in self._ends:
            return self._end("end")
        if token in self._stop_ids:
            return self._end("stop")
        self.added.append(token)
        new = self._detokenizer.add([token])
        if self._may_drop_space and new:
            self._may_drop_space = False
            if new.startswith(" ") and not self._tokenizer.decode(self.added).startswith(" "):
                new = new[1:]
        piece = self._show(self._stops.add(new))
        if self._stops.has_ended:
            self.ending = "stop"
        elif len(self.added) >= self.count:
            return piece + self._end("tokens")
        return piece

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON types: generated text, number of added tokens, and reason of the end."""
        return {"text": self.text, "tokens": len(self.added), "ending": self.ending}

    def _end(self, ending: Ending) -> str:
        self.ending = ending
        piece = self._stops.add(self._detokenizer.rest())
        if self._stops.has_ended:
            self.ending = "stop"
            return self._show(piece)
        return self._show(piece + self._stops.rest())

    def _show(self, piece: str) -> str:
        self.text += piece
        return piece


def extend(decoder: Decoder, texts: Sequence[Continuation], sampling: Sampling) -> Iterator[tuple[int, str]]:
    """Generate continuations in a batch until each has ended.

    Yields the index of a continuation with its next piece of text, which splits no character.
    """
    decoder.begin(len(texts))
    pieces: list[Sequence[int]] = [text.ids for text in texts]
    while any(pieces):
        scores = decoder.scores(pieces)
        for number, text in enumerate(texts):
            if not pieces[number]:
                continue
            token = sampling.draw(scores[number], text.generator)
            yield number, text.add(token)
            pieces[number] = () if text.ending else (token,)


@dataclass(frozen=True)
class GenerateRequest:
    """Prompts to continue in one batch, with their limits."""

    prompts: tuple[str, ...]
    max_new_tokens: int  # tokens to add; fewer if a text ends or reaches the model's length
    seed: int = 0
    stops: tuple[str, ...] = ()  # stop texts; a continuation ends before the first one found

    def __post_init__(self) -> None:
        if not all(self.prompts) or not self.prompts or "" in self.stops:
            named = "--stop" if self.prompts and all(self.prompts) else "--prompt"
            raise ConfigError(f"{named} is empty; give at least one character")
        for text in (*self.prompts, *self.stops):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                at = f"at character {error.start}"
                raise ConfigError(f"--prompt and --stop take UTF-8 text, but {text[:40]!a} is invalid {at}") from error


def generate(
    address: str,
    request: GenerateRequest,
    sampling: Sampling,
    show: Callable[[int, str], None] | None = None,
    on_found: Callable[[Trained], None] = lambda model: None,
) -> tuple[Trained, list[Continuation]]:
    """Generate continuations with a model; every tensor parallel rank calls this function and gets the same texts.

    Args:
        address: A checkpoint, a run folder, a mirror or its address, or a Hugging Face folder.
        show: Called with a prompt's index and its next piece of text, first with the prompt itself; None: progress is
            printed.
        on_found: Called with the model before its weights are read.
    """
    model = Trained.find(address)
    for prompt in request.prompts:
        _refuse_misfit(model.tokenizer.encode(prompt).ids, model)
    on_found(model)
    with closing(open_backend(choose("auto")[0])) as backend:
        return model, generate_on(backend, model, request, sampling, show)


def generate_on(
    backend: Backend,
    model: Trained,
    request: GenerateRequest,
    sampling: Sampling,
    show: Callable[[int, str], None] | None = None,
) -> list[Continuation]:
    """Generate continuations on an open backend, whose ranks share the model by tensor parallelism; see `generate`.

    The first rank prints the progress until the first token.
    """
    mesh = Mesh.build(backend.world, backend.rank, tp=backend.world)
    backend.lay_out(mesh)
    texts, (_, length) = [], model.config.longest_sequence
    for prompt in request.prompts:
        ids = model.tokenizer.encode(prompt).ids
        count = min(request.max_new_tokens, length - len(ids))
        stops, seed = request.stops, request.seed
        texts.append(Continuation(ids, count, model.tokenizer, model.ends, stops=stops, seed=seed))
    longest = max(len(text.ids) + text.count for text in texts)
    console = standard_error(quiet=backend.rank > 0)
    with Progress(f"reading the weights of {model.location}", console=console) as progress:
        decoder = Decoder(model.open(backend, longest, mesh), backend.put)
        progress.show(0, f"reading {sum(len(text.ids) for text in texts):,} tokens of prompts")
        pieces = extend(decoder, texts, sampling)
        first = next(pieces)
        if show is None:
            progress.total = sum(text.count for text in texts)
            progress.show(1, "continuing the prompts")
            for num_tokens, _ in enumerate(pieces, 2):
                progress.show(num_tokens)
    if show is not None:
        for number, text in enumerate(texts):
            show(number, text.prompt)
        show(*first)
        for number, piece in pieces:
            show(number, piece)
    for text in texts:
        if text.ending == "tokens" and text.count < request.max_new_tokens:
            text.ending = "length"
    return texts


def _refuse_misfit(ids: Sequence[int], model: Trained) -> None:
    if not ids:
        raise ConfigError("--prompt has no token in the model's vocabulary; give another text to continue")
    limit, length = model.config.longest_sequence
    if len(ids) >= length:
        raise ConfigError(
            f"--prompt has {len(ids):,} tokens; with the new tokens, the model's maximum is {limit}={length:,}; "
            f"shorten the prompt by {len(ids) - length + 1:,} tokens or more"
        )
    model.refuse_foreign(max(ids))
