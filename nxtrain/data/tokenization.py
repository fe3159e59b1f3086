"""Tokenizers: a byte-level BPE trained on the data, or any tokenizer file in Hugging Face's format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nxtrain.common.errors import DataError, cause_of
from nxtrain.common.hf_files import TOKENIZER, TOKENIZER_CONFIG
from nxtrain.common.io.object_store import Location, content_of
from nxtrain.common.io.regular import read_bytes
from nxtrain.data.storage import Tokens, replacing, unreadable

END_OF_TEXT = "<|endoftext|>"

ANCHOR = "\ufdd0"
"""Text that stands for earlier text of a document: a Unicode noncharacter, which no tokenizer merges with others."""

# End-of-document tokens of GPT, Llama 3, Llama 2 and Gemma, for a tokenizer without a tokenizer_config.json.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True)
class KnownTokenizer:
    """A tokenizer that exists already and need not be trained.

    Args:
        path: A `tokenizer.json`, or its folder.
        origin: Origin of a tokenizer that the configuration does not name, for messages; else empty.
        end: Token that ends a document; empty to take it from the tokenizer's configuration, or to guess it by name.
    """

    path: Path
    origin: str = ""
    end: str = ""


@dataclass(frozen=True)
class TextTokenizer:
    """A loaded tokenizer whose ids fit the model's vocabulary.

    Attributes:
        path: Path of the `tokenizer.json`.
        tokenizer: The tokenizer.
        end: Token that ends a document.
        end_id: Id of this token.
        dtype: Smallest integer type for all ids.
        digest: Hash of the file's content.
        begin: Ids that the tokenizer puts before a text, such as a begin-of-text token; mostly none.
        adds_space: The tokenizer adds a space before a text, as those of Llama 2 and Mistral do.
    """

    path: Path
    tokenizer: Tokenizer
    end: str
    end_id: int
    dtype: np.dtype[np.unsignedinteger[Any]]
    digest: str
    begin: tuple[int, ...] = ()
    adds_space: bool = False

    @property
    def marks(self) -> str:
        """Additions to the ids of a document's text, for identities of ids; empty for the usual end alone."""
        marks = []
        if self.begin:
            marks.append(f"begin {list(self.begin)}")
        if self.adds_space:
            marks.append("one space")
        if self.end != _named_end(self.tokenizer, _END_NAMES):
            marks.append(f"end {self.end}")
        return ", ".join(marks)

    def anchor(self, before: str) -> str:
        """Text to encode before a part of a document, so that the part gets no space of the beginning of a text.

        The caller removes the anchor's ids. Empty if the text before does not change the ids of the part.

        Args:
            before: Text of the document before the part.
        """
        anchor, stripped = "", before.rstrip()
        for token, takes_spaces in self._anchors:
            end = stripped if takes_spaces else before
            if end.endswith(token) and len(token) > len(anchor):
                anchor = token  # the text after such a token begins again
        if self.adds_space and not anchor:
            anchor = ANCHOR
        return anchor

    @cached_property
    def _anchors(self) -> tuple[tuple[str, bool], ...]:
        """Tokens that are found before a text is split, and change the ids after them; True if they take in spaces."""
        anchors = []
        for token in self.tokenizer.get_added_tokens_decoder().values():
            is_found = not token.special or not self.tokenizer.encode_special_tokens
            if is_found and (token.rstrip or self.adds_space):
                anchors.append((token.content, token.rstrip))
        return tuple(anchors)

    def encode(self, texts: Sequence[str]) -> Iterator[Tokens]:
        """Token ids of each text. Text that looks like a special token is encoded as ordinary text."""
        for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            yield np.array(encoding.ids, self.dtype)


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE tokenizer and save it. Equal texts give equal files with any number of threads.

    Id 0 is `<|endoftext|>`, ids 1 to 256 are the bytes. Short texts may yield fewer than `vocab_size` entries.

    Raises:
        DataError: The vocabulary is smaller than the number of bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise DataError(
            f"model.config.vocab_size={vocab_size} is too small for the {len(alphabet)} bytes and {END_OF_TEXT}; "
            f"a tokenizer trained on the data needs {len(alphabet) + 1} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    with replacing(path) as file:
        file.write(tokenizer.to_str(pretty=True).encode())


def load_tokenizer(path: Path, vocab_size: int, end: str = "") -> TextTokenizer:
    """Load a `tokenizer.json`, given as a file or by its folder.

    Args:
        end: Token that ends a document; empty to take it from the tokenizer's configuration, or to guess it by name.

    Raises:
        DataError: The file is missing or unreadable, has ids beyond the vocabulary, or no known end-of-text token.
    """
    file = path / TOKENIZER if path.is_dir() else path
    try:
        content = read_bytes(file)
        tokenizer = Tokenizer.from_buffer(content)
    except OSError as error:
        raise unreadable(f"data.tokenizer: {file}", error) from error
    except Exception as error:  # tokenizers raises nothing narrower
        raise DataError(f"data.tokenizer: {file} is not a tokenizer.json of Hugging Face: {error}") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    token, last = max(vocabulary.items(), key=lambda entry: entry[1])
    if last >= vocab_size:
        raise DataError(
            f"data.tokenizer: {file} has ids up to {last} ({token!r}), but the model's vocabulary ends at "
            f"{vocab_size - 1}; set model.config.vocab_size={last + 1} or more, or choose another tokenizer"
        )
    # A file may set truncation and padding for its original task; a corpus wants neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    digest = hashlib.blake2b(content).hexdigest()
    end, end_id = _end_of(tokenizer, file, end)
    begin, adds_space = _begin_of(tokenizer), _adds_space(tokenizer)
    return TextTokenizer(file, tokenizer, end, end_id, np.min_scalar_type(last), digest, begin, adds_space)


def end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens whose names commonly mark the end of a text."""
    ids = map(tokenizer.token_to_id, _END_NAMES)
    return frozenset(number for number in ids if number is not None)


def declared_end(file: Path) -> str:
    """End-of-document token in the `tokenizer_config.json` next to a tokenizer; empty if not declared."""
    return declared_token(file.parent, "eos_token")


def declared_token(folder: Location, role: str) -> str:
    """Token with a role, such as `bos_token`, in the `tokenizer_config.json` of a folder; empty if absent."""
    config = folder / TOKENIZER_CONFIG
    try:
        declared = json.loads(content_of(config)).get(role)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise unreadable(f"data.tokenizer: {config}", error) from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"data.tokenizer: {config} is not JSON: {cause_of(error)}") from error
    if isinstance(declared, dict):
        declared = declared.get("content")
    return declared if isinstance(declared, str) else ""


def _end_of(tokenizer: Tokenizer, file: Path, given: str) -> tuple[str, int]:
    names: tuple[str, ...] = _END_NAMES
    end = given or declared_end(file)
    if end:
        names = (end,)
    name = _named_end(tokenizer, names)
    end_id = tokenizer.token_to_id(name)
    if end_id is not None:
        return name, end_id
    raise DataError(
        f"data.tokenizer: {file} has no token that ends a document (looked for {', '.join(names)}); "
        f'name it as "eos_token" in {file.with_name(TOKENIZER_CONFIG)}'
    )


def _named_end(tokenizer: Tokenizer, names: Sequence[str]) -> str:
    """First of some token names that a tokenizer has; empty if it has none."""
    return next((name for name in names if tokenizer.token_to_id(name) is not None), "")


def _begin_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that a tokenizer puts before a text, as transformers encodes it."""
    alone, whole = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    for first in range(len(whole) - len(alone) + 1):
        if whole[first : first + len(alone)] == alone:
            return tuple(whole[:first])
    return ()


def _adds_space(tokenizer: Tokenizer) -> bool:
    """True if a tokenizer adds a space before a text."""
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        if part is not None and _is_spacing(json.loads(part.__getstate__())):
            return True
    return False


def _is_spacing(part: dict[str, Any]) -> bool:
    """True if a normalizer or pre-tokenizer, or one in its sequence, adds a space before a text."""
    match part.get("type"):
        case "Prepend":
            return True
        case "Metaspace":
            return bool(part.get("prepend_scheme", "always") != "never")
        case "ByteLevel":
            return bool(part.get("add_prefix_space"))
    return any(map(_is_spacing, [*part.get("normalizers", []), *part.get("pretokenizers", [])]))
