"""Texts of which the local tasks are made: what a run holds out, or else modules of the standard library."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from nxtrain.common.errors import NxtrainError
from nxtrain.common.run_folder import CONFIG_FILE, DATA_DIR
from nxtrain.common.vocab import END_BIT, ID_MASK
from nxtrain.config.check import resolve_model
from nxtrain.config.load import load
from nxtrain.data.corpora import stdlib_texts
from nxtrain.data.dataset import open_held_out

MAX_TOKENS = 1 << 18
"""Most tokens of a run's held-out text that are read."""

MAX_MODULES = 100
"""Most modules of the standard library that are read."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def texts_of(run: Path | None, tokenizer: Tokenizer, ends: frozenset[int]) -> tuple[str, list[str]]:
    """Texts for a model, and their origin in words.

    Args:
        run: Run folder of the model; None: there is none.
        tokenizer: Tokenizer of the model.
        ends: Ids that end a text.
    """
    if run is not None and (texts := _held_out(run, tokenizer, ends)):
        return "held-out text of the run", texts
    return "standard library of Python", list(islice(stdlib_texts(), MAX_MODULES))


def _held_out(run: Path, tokenizer: Tokenizer, ends: frozenset[int]) -> list[str]:
    """Documents that a run holds out; none if the run has none, or its token file is gone."""
    try:
        config = load(run / CONFIG_FILE).config
        vocab_size = resolve_model(config).vocab_size
        samples = open_held_out(config.data, config.train.seq_len, vocab_size, run / DATA_DIR)
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
