"""Offline suite of evaluation tasks, generated from texts and a seed.

The tasks need no network, and the same inputs give the same requests. The texts are the held-out data of a run, or else
modules of Python's standard library. Choices are shuffled, so that a model that prefers the first or the last choice
has no advantage.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from nxtrain.common.errors import NxtrainError, StorageError
from nxtrain.common.run_folder import CONFIG_FILE, DATA_DIR
from nxtrain.common.vocab import END_BIT, ID_MASK
from nxtrain.config.check import resolve_model
from nxtrain.config.load import load
from nxtrain.data.corpora import stdlib_texts
from nxtrain.data.dataset import open_held_out
from nxtrain.tools.eval.task import Request, Task

MAX_TOKENS = 1 << 18  # maximum number of tokens read from a run's held-out data
MAX_MODULES = 100  # maximum number of modules read from the standard library
NUM_CHOICES = 4  # choices of a request, except for induction
_TEXT_CHARS = 1024  # maximum length in characters of a held_out request, scored in bits per byte
_CONTEXT_CHARS = 400  # maximum length in characters of the context of a cloze request
_LIST_WORDS = 6  # words of a list in the tasks copying and induction
_LARGEST = 9  # largest summand in arithmetic
_EXAMPLES = 4  # solved examples before each arithmetic question
_ROUNDS = 1000  # maximum number of cloze requests from the same text

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"

_WORD = re.compile(r"\b[A-Za-z]{3,12}\b")

Maker = Callable[[random.Random, Sequence[str]], Iterator[Request]]


def _held_out(drawn: random.Random, texts: Sequence[str]) -> Iterator[Request]:
    """Yield requests of the task `held_out`: one piece of each text, in random order, for bits per byte."""
    for text in drawn.sample(texts, len(texts)):
        start = drawn.randrange(max(1, len(text) - _TEXT_CHARS + 1))
        piece = text[start : start + _TEXT_CHARS].strip()
        if piece:
            yield Request("", (piece,))


def _cloze(drawn: random.Random, texts: Sequence[str]) -> Iterator[Request]:
    """Yield requests of the task `cloze`: predict the next word of a text, among other words of the same text.

    Each round over the texts has another order.
    """
    for text in chain.from_iterable(drawn.sample(texts, len(texts)) for _ in range(_ROUNDS)):
        words = list(_WORD.finditer(text))
        following = [word for word in words if text[: word.start()].endswith(" ") and text[: word.start()].strip()]
        if not following:
            continue
        right = drawn.choice(following)
        others = sorted({word[0] for word in words} - {right[0]})
        if len(others) >= NUM_CHOICES - 1:
            context = text[max(0, right.start() - 1 - _CONTEXT_CHARS) : right.start() - 1]
            yield _choose(drawn, context, right[0], drawn.sample(others, NUM_CHOICES - 1))


def _copying(drawn: random.Random, texts: Sequence[str]) -> Iterator[Request]:
    """Yield requests of the task `copying`: predict the last word of a list of words that is written twice."""
    vocabulary = _vocabulary(texts)
    while len(vocabulary) >= _LIST_WORDS:
        words = drawn.sample(vocabulary, _LIST_WORDS)
        written = f"{' '.join(words)}\n{' '.join(words[:-1])}"
        yield _choose(drawn, written, words[-1], drawn.sample(words[:-1], NUM_CHOICES - 1))


def _induction(drawn: random.Random, texts: Sequence[str]) -> Iterator[Request]:
    """Yield requests of the task `induction`: a list of words ends with a repeated word, predict the word after it.

    The right word is the one that followed the earlier occurrence: a b ... a, then b.
    """
    vocabulary = _vocabulary(texts)
    while len(vocabulary) >= _LIST_WORDS:
        words = drawn.sample(vocabulary, _LIST_WORDS)
        at = drawn.randrange(_LIST_WORDS - 2)
        others = [word for word in words if word not in words[at : at + 2]]
        yield _choose(drawn, f"{' '.join(words)} {words[at]}", words[at + 1], others)


def _arithmetic(drawn: random.Random, texts: Sequence[str]) -> Iterator[Request]:
    """Yield requests of the task `arithmetic`: add two one-digit numbers, after some solved examples."""
    numbers = range(2 * _LARGEST + 1)
    while True:
        pairs = [(drawn.randint(0, _LARGEST), drawn.randint(0, _LARGEST)) for _ in range(_EXAMPLES + 1)]
        solved = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs[:-1])
        a, b = pairs[-1]
        others = drawn.sample([str(number) for number in numbers if number != a + b], NUM_CHOICES - 1)
        yield _choose(drawn, f"{solved}{a} + {b} =", str(a + b), others)


OFFLINE: Mapping[str, Maker] = {
    "held_out": _held_out,
    "cloze": _cloze,
    "copying": _copying,
    "induction": _induction,
    "arithmetic": _arithmetic,
}
"""Generator of requests for each task of the offline suite, by name."""


def offline_task(name: str, texts: Sequence[str], seed: int, limit: int) -> Task:
    """Create a task of the offline suite; it has no requests if the texts are too short."""
    drawn = random.Random(f"{seed} {name}")
    return Task(name, tuple(islice(OFFLINE[name](drawn, texts), limit)))


def _vocabulary(texts: Sequence[str]) -> list[str]:
    words: set[str] = set()
    for text in texts:
        words.update(word.lower() for word in _WORD.findall(text))
    return sorted(words)


def _choose(drawn: random.Random, context: str, right: str, others: Sequence[str]) -> Request:
    choices = [right, *others]
    drawn.shuffle(choices)
    return Request(context, tuple(f" {choice}" for choice in choices), choices.index(right))


def texts_of(run: Path | None, tokenizer: Tokenizer, ends: frozenset[int]) -> tuple[str, list[str]]:
    """Choose the texts of the offline tasks for a model, and describe their origin.

    Args:
        run: Run folder of the model; None: the model belongs to no run.
        tokenizer: Tokenizer of the model.
        ends: Ids of end-of-text tokens.

    Returns:
        Origin of the texts in words; the texts.
    """
    texts = []
    if run is not None:
        texts = _held_out_texts(run, tokenizer, ends)
    if texts:
        return "held-out text of the run", texts
    return "standard library of Python", list(islice(stdlib_texts(), MAX_MODULES))


def _held_out_texts(run: Path, tokenizer: Tokenizer, ends: frozenset[int]) -> list[str]:
    """Held-out documents of a run; empty if the run has none or its token file is missing."""
    try:
        config = load(run / CONFIG_FILE).config
        vocab_size = resolve_model(config).vocab_size
        samples = open_held_out(config.data, config.train.seq_len, vocab_size, run / DATA_DIR)
    except StorageError:  # results on other texts could not be compared
        raise
    except (NxtrainError, OSError):
        return []
    if samples is None or not samples.num_rows:
        return []
    rows = samples.rows(np.arange(min(samples.num_rows, max(1, MAX_TOKENS // samples.seq_len))))
    # A row begins with the last token of the row before it.
    marked = rows[:, :-1].ravel()
    ids, is_last = marked & ID_MASK, marked & END_BIT != 0
    if not is_last.any():  # token files of earlier releases have no marks
        is_last = np.isin(ids, sorted(ends))
    texts = []
    for document in np.split(ids, np.flatnonzero(is_last) + 1):
        tokens = document.tolist()
        if tokens and tokens[-1] in ends:
            tokens.pop()
        # Tokens may begin or end inside of a character.
        text = str(tokenizer.decode(tokens)).strip(_UNFINISHED)
        if text.strip():
            texts.append(text)
    return texts
