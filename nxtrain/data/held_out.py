"""Unigram entropy and number of bytes of held-out text, as references for the held-out loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

from nxtrain.common.io.regular import read_bytes
from nxtrain.common.vocab import IGNORE_INDEX
from nxtrain.data.loader import batch_of
from nxtrain.data.samples import Samples

_CHUNK_TOKENS = 1 << 22
"""Tokens that are counted at once: 32 MiB as int64."""


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Entropy of target tokens under their own frequencies, in nats per token.

    This is the lowest possible loss of a model without context.
    """
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def target_bytes(counts: NDArray[np.int64], tokenizer: Path) -> int | None:
    """Number of text bytes that target tokens represent, counted token by token, so that cut documents count exactly.

    Returns:
        The bytes; None if the tokens have no fixed number of bytes, or if there are other ids.
    """
    lengths = token_bytes(tokenizer)
    if lengths is None:
        return None
    is_known = counts.size <= lengths.size and bool((lengths[: counts.size][counts > 0] >= 0).all())
    return int(counts @ lengths[: counts.size]) if is_known else None


def target_counts(samples: Samples, num_rows: int | None = None, *, doc_mask: bool = False) -> NDArray[np.int64]:
    """Count each token id among the targets that have a loss: (n,), where n - 1 is the greatest id.

    Args:
        num_rows: Number of first rows to count; None for all.
        doc_mask: Batches have masks between documents, so the first token of a document is not a target.
    """
    if num_rows is None:
        num_rows = samples.num_rows
    num_rows = min(num_rows, samples.num_rows)
    counts = np.zeros(0, np.int64)
    chunk_rows = -(-_CHUNK_TOKENS // samples.seq_len)
    for start in range(0, num_rows, chunk_rows):
        indices = np.arange(start, min(start + chunk_rows, num_rows))
        targets = batch_of(samples.rows(indices), 1, doc_mask=doc_mask).targets
        of_chunk = np.bincount(targets[targets != IGNORE_INDEX], minlength=counts.size)
        of_chunk[: counts.size] += counts
        counts = of_chunk
    return counts


def token_bytes(file: Path) -> NDArray[np.int64] | None:
    """Number of text bytes of each token of a byte-level tokenizer, (n,); 0 for special tokens.

    Returns:
        The bytes by id, -1 for unused ids; None for a tokenizer that is not byte-level, or that changes text.
    """
    try:
        content = read_bytes(file)
        keeps = _keeps_bytes(json.loads(content))
    except (OSError, RecursionError, ValueError):  # gone or changed during the run, whose result does not depend on it
        return None
    if not keeps:
        return None
    tokenizer = Tokenizer.from_buffer(content)
    alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not alphabet <= vocabulary.keys():
        return None
    lengths = np.full(max(vocabulary.values()) + 1, -1, np.int64)
    for token, number in vocabulary.items():
        # Each character of the alphabet spells one byte. The decoder leaves other tokens as they are.
        lengths[number] = len(token) if alphabet.issuperset(token) else len(token.encode())
    for number, added in tokenizer.get_added_tokens_decoder().items():
        if added.lstrip or added.rstrip:  # the token takes in the spaces next to it
            return None
        lengths[number] = 0 if added.special else len(added.content.encode())
    return lengths


def _keeps_bytes(file: dict[str, Any]) -> bool:
    """True if the tokens of any text represent exactly its bytes."""
    decoder, splitter = file.get("decoder") or {}, file.get("pre_tokenizer") or {}
    parts = [splitter]
    if splitter.get("type") == "Sequence":
        parts = splitter.get("pretokenizers", [])
    return (
        file.get("normalizer") is None
        and decoder.get("type") == "ByteLevel"
        and any(part.get("type") == "ByteLevel" for part in parts)
        and all(_keeps_text(part) for part in parts)
    )


def _keeps_text(splitter: dict[str, Any]) -> bool:
    match splitter.get("type"):
        case "ByteLevel":
            return splitter.get("add_prefix_space") is False
        case "Split":
            return splitter.get("behavior") != "Removed"
        case "Digits":
            return True
        case _:
            return False
