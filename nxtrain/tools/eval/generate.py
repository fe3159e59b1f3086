"""Continue texts with the weights of a checkpoint, or of a Hugging Face folder: one text, or several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
"""End of a continuation: the model's token, a stop text, the number of tokens, the model's length; empty: none yet."""


@dataclass(frozen=True)
class Sampling:
    """Rule by which tokens are drawn.

    Source: Holtzman et al. 2020 (arXiv:1904.09751) section 3.1, for top_p.
    """

    temperature: float = 0.8  # divides the scores; 0 takes the likeliest token
    top_k: int = 50  # number of likeliest tokens to choose among; 0: all
    top_p: float = 1.0  # joint probability of the likeliest tokens to choose among; 1: all

    def draw(self, scores: Tensor, generator: torch.Generator) -> int:
        """Choose a token by the scores (V,) of the vocabulary; scores that are not finite are a DivergedError."""
        if not bool(torch.isfinite(scores).all()):
            raise DivergedError("the model's scores are not finite: its weights diverged; take an earlier checkpoint")
        if self.temperature == 0:
            return int(scores.argmax())
        best, tokens = scores.double().topk(min(self.top_k or scores.numel(), scores.numel()))
        # Subtract the best score first: dividing by a temperature near 0 would overflow.
        chances = ((best - best[0]) / self.temperature).softmax(0)
        if self.top_p < 1:  # the rounded sum of all but the rarest tokens may reach 1
            before = chances.cumsum(0) - chances
            chances = torch.where(before < self.top_p, chances, 0.0)
        return int(tokens[torch.multinomial(chances, 1, generator=generator)])


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # character that a tokenizer decodes from bytes that form no whole character


class Detokenizer:
    """Text of a growing list of tokens, in pieces that split no character.

    Tokens are decoded together with the tokens before them, since the first token of a text may lose its space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._shown = 0

    def add(self, ids: Sequence[int], *, is_whole: bool = False) -> str:
        """Append tokens and return the new whole characters.

        Args:
            is_whole: No further token belongs to the last character, which may be `_UNFINISHED` itself.
        """
        self._ids += ids
        text = self._new_text()
        if not text or (text.endswith(_UNFINISHED) and not is_whole):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def rest(self) -> str:
        """Text at the end that forms no whole character."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        return str(self._tokenizer.decode(self._ids[self._context :])[len(before) :])


class Stops:
    """Filter that ends a text before the first stop text; `has_ended` is True once there was one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.has_ended = False

    def add(self, text: str) -> str:
        """Append text and return the part to show: all before a stop text, or before an end that may begin one."""
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
        """Return the text that was held back."""
        shown, self._held = self._held, ""
        return shown


class Continuation:
    """A text that grows token by token, by `count` tokens at most, until one of `ends` or a stop text.

    Args:
        ids: Tokens of the prompt.
        seed: Seed of the random generator; a text's tokens depend on no other text.
    """

    def __init__(
        self,
        ids: Sequence[int],
        count: int,
        tokenizer: Tokenizer,
        ends: frozenset[int] = frozenset(),
        *,
        stops: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self.ids = tuple(ids)
        self.count = count
        self._ends = ends
        self._detokenizer, self._stops = Detokenizer(tokenizer), Stops(stops)
        self.generator = torch.Generator().manual_seed(seed)
        self.prompt = self._detokenizer.add(self.ids, is_whole=True)
        self.added: list[int] = []
        self.text = ""
        self.ending: Ending = ""

    def add(self, token: int) -> str:
        """Append a token; return the text that the token completes."""
        if token in self._ends:
            return self._end("end")
        self.added.append(token)
        piece = self._show(self._stops.add(self._detokenizer.add([token])))
        if self._stops.has_ended:
            self.ending = "stop"
        elif len(self.added) >= self.count:
            return piece + self._end("tokens")
        return piece

    def to_json(self) -> dict[str, Any]:
        """Text, number of added tokens, and reason of the end."""
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
    """Continue texts until each has ended, and yield the number of a text with its next piece in whole characters."""
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
    """Texts to continue together."""

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
                raise ConfigError(f"--prompt and --stop take UTF-8 text, and {text[:40]!a} is none {at}") from error


def generate(
    address: str,
    request: GenerateRequest,
    sampling: Sampling,
    show: Callable[[int, str], None] | None = None,
    on_found: Callable[[Trained], None] = lambda model: None,
) -> tuple[Trained, list[Continuation]]:
    """Continue texts; every rank of a tensor parallel world calls this, and gets the same texts.

    Args:
        address: A checkpoint, a run folder, a mirror or its address, or a Hugging Face folder.
        show: Called with the number of a text and its next piece, first with each prompt; None: progress is printed.
        on_found: Called with the model before its weights are read.
    """
    model = Trained.find(address)
    for prompt in request.prompts:
        _refuse_misfit(model.tokenizer.encode(prompt).ids, model)
    on_found(model)
    backend = open_backend(choose("auto")[0])
    try:
        return model, generate_on(backend, model, request, sampling, show)
    finally:
        backend.close()


def generate_on(
    backend: Backend,
    model: Trained,
    request: GenerateRequest,
    sampling: Sampling,
    show: Callable[[int, str], None] | None = None,
) -> list[Continuation]:
    """Continue texts on an open backend, whose ranks share the model by tensor parallelism; see `generate`.

    The first rank prints the progress of all work before the first token.
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
            f"--prompt has {len(ids):,} tokens, and the model's length is {limit}={length:,} with what is added; "
            f"shorten the prompt by {len(ids) - length + 1:,} tokens or more"
        )
    model.refuse_foreign(max(ids))
