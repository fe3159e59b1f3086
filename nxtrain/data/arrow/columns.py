"""Columns of a prepared corpus: documents as text, or as token ids that end with the tokenizer's end of text."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from nxtrain.common.errors import ConfigError, DataError
from nxtrain.common.io.object_store import Location
from nxtrain.data.tokenization import TextTokenizer, load_tokenizer

FORMAT_VERSION = 1

FORMAT_KEY = b"nxtrain.format"
SOURCES_KEY = b"nxtrain.sources"
SETTINGS_KEY = b"nxtrain.settings"
TOKENIZER_KEY = b"nxtrain.tokenizer"
END_KEY = b"nxtrain.end_of_text"
END_ID_KEY = b"nxtrain.end_id"
SHARD_KEY = b"nxtrain.shard"
CHECKSUMS_KEY = b"nxtrain.checksums"

CHECKSUMS = "xxh3-64"
"""Value of the entry `CHECKSUMS_KEY`: the kind of a file's checksums. Files of earlier releases lack the entry."""

TEXT = "text"
IDS = "ids"
PROMPT = "prompt"
"""Names of the columns; the optional last column has the length of each document's prompt, in bytes or tokens."""

SECTION_CHARS = 1 << 20
"""Longest text that is encoded in one call. Longer documents are cut at ends of lines, which bounds the memory."""

Ids = np.ndarray[tuple[int], np.dtype[np.uint32]]

_ENCODE_BYTES = 1 << 20  # an encoding takes some 100 bytes a token

_ANY_VOCABULARY = 1 << 32


@dataclass(frozen=True)
class Settings:
    """Settings of a preparation that, with the sources, determine the bytes of a prepared corpus.

    Args:
        lines: Each line of a text file is a document.
        tokenizer: Digest of the tokenizer; empty for a corpus of text.
        shard_bytes: Size at which a shard ends; 0 for one file.
        prompt: Field or column that holds the prompts; empty: none.
        chat: Digest of the template that writes conversations; empty: documents are text.
    """

    field: str
    lines: bool
    tokenizer: str
    shard_bytes: int
    prompt: str = ""
    chat: str = ""
    sections: bool = False

    def to_json(self) -> str:
        """Settings as JSON for the schema's metadata and the journal; optional settings appear only if they are set."""
        later = ("prompt", "chat", "sections")
        named = {key: value for key, value in asdict(self).items() if value or key not in later}
        return json.dumps(named, sort_keys=True)


class Column(Protocol):
    """Kind of column for the documents of a corpus."""

    @property
    def field(self) -> pa.Field:
        """Name and type."""
        ...

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Entries of the schema's metadata."""
        ...

    def array(self, texts: Sequence[bytes], prompts: Sequence[int]) -> tuple[pa.Array, Sequence[int]]:
        """Column of documents in UTF-8, and the lengths of their prompts in the unit of the column.

        Args:
            prompts: Bytes of each document's prompt.
        """
        ...


class TextColumn:
    """Documents as text."""

    @property
    def field(self) -> pa.Field:
        """Name and type."""
        return pa.field(TEXT, pa.large_string(), nullable=False)

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Entries of the schema's metadata."""
        return {}

    def array(self, texts: Sequence[bytes], prompts: Sequence[int]) -> tuple[pa.Array, Sequence[int]]:
        """Column of documents in UTF-8, which were checked when they were read, and the lengths of their prompts."""
        ends = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(text) for text in texts], out=ends[1:])
        content = pa.py_buffer(b"".join(texts))
        return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(ends), content), prompts


class IdsColumn:
    """Documents as token ids of the smallest of uint16 and uint32 that holds the vocabulary."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._dtype = np.promote_types(tokenizer.dtype, np.uint16)

    @property
    def field(self) -> pa.Field:
        """Name and type."""
        item = pa.field("item", pa.from_numpy_dtype(self._dtype), nullable=False)
        return pa.field(IDS, pa.large_list(item), nullable=False)

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Entries of the schema's metadata."""
        return {
            TOKENIZER_KEY: self._tokenizer.digest.encode(),
            END_KEY: self._tokenizer.end.encode(),
            END_ID_KEY: str(self._tokenizer.end_id).encode(),
        }

    def array(self, texts: Sequence[bytes], prompts: Sequence[int]) -> tuple[pa.Array, Sequence[int]]:
        """Column of documents, each with the end of text after it, and the lengths of their prompts."""
        encoded = list(encode_prompted(self._tokenizer, texts, prompts))
        documents = [ids for ids, _ in encoded]
        ends = np.zeros(len(documents) + 1, np.int64)
        np.cumsum([ids.size for ids in documents], out=ends[1:])
        values: np.ndarray[tuple[int], np.dtype[Any]] = np.empty(0)
        if documents:
            values = np.concatenate(documents, dtype=self._dtype, casting="same_kind")
        items = pa.array(values, pa.from_numpy_dtype(self._dtype))
        array = pa.LargeListArray.from_arrays(pa.array(ends), items, type=self.field.type)
        return array, [num_tokens for _, num_tokens in encoded]


def encode_prompted(
    tokenizer: TextTokenizer, texts: Sequence[bytes], prompts: Sequence[int]
) -> Iterator[tuple[Ids, int]]:
    """Ids of each document, with the end of text after them, and the number of its prompt's tokens.

    A prompt is encoded apart from its answer, so that no token is of both.

    Args:
        texts: Documents in UTF-8.
        prompts: Bytes of each document's prompt.
    """
    answers = encode(tokenizer, [text[length:] for text, length in zip(texts, prompts, strict=True)])
    if not any(prompts):
        yield from ((ids, 0) for ids in answers)
        return
    begins = encode(tokenizer, [text[:length] for text, length in zip(texts, prompts, strict=True)])
    for begin, answer in zip(begins, answers, strict=True):
        yield np.concatenate([begin[:-1], answer]), begin.size - 1


def encode(tokenizer: TextTokenizer, texts: Sequence[bytes]) -> Iterator[Ids]:
    """Ids of each document in UTF-8, with the end of text after them; many documents are encoded at once."""
    end = np.array([tokenizer.end_id], np.uint32)
    held: list[Ids] = []
    for batch in _batches(texts):
        encoded = tokenizer.tokenizer.encode_batch_fast([section for section, _ in batch], add_special_tokens=False)
        for encoding, (_, is_last) in zip(encoded, batch, strict=True):
            held.append(np.frombuffer(array("I", encoding.ids), np.uint32))  # three times as fast as numpy.array
            if is_last:
                yield np.concatenate([*held, end])
                held.clear()


def _batches(texts: Sequence[bytes]) -> Iterator[list[tuple[str, bool]]]:
    """Sections of documents in groups of bounded size; True marks the last section of a document."""
    batch: list[tuple[str, bool]] = []
    num_bytes = 0
    for text in texts:
        for section, is_last in _sections(text.decode()):
            batch.append((section, is_last))
            num_bytes += len(section)
            if num_bytes >= _ENCODE_BYTES:
                yield batch
                batch, num_bytes = [], 0
    if batch:
        yield batch


def _sections(text: str) -> Iterator[tuple[str, bool]]:
    start = 0
    while len(text) - start > SECTION_CHARS:
        end = text.rfind("\n", start, start + SECTION_CHARS) + 1 or start + SECTION_CHARS
        yield text[start:end], False
        start = end
    yield text[start:], True


def open_tokenizer(folder: Path) -> TextTokenizer:
    """Load the tokenizer that --tokenizer names."""
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.exists():
        raise ConfigError(f"--tokenizer: {file} does not exist; give a folder with tokenizer.json, or the file")
    try:
        return load_tokenizer(file, _ANY_VOCABULARY)
    except DataError as error:
        raise DataError(f"{error}".replace("data.tokenizer", "--tokenizer", 1)) from error


def schema_of(column: Column, sources: str, settings: Settings, shard: int) -> pa.Schema:
    """Schema of a shard; its metadata names the format, the sources, the settings and the tokenizer."""
    metadata = {
        FORMAT_KEY: str(FORMAT_VERSION).encode(),
        SOURCES_KEY: sources.encode(),
        SETTINGS_KEY: settings.to_json().encode(),
        SHARD_KEY: str(shard).encode(),
        CHECKSUMS_KEY: CHECKSUMS.encode(),
        **column.metadata,
    }
    fields = [column.field]
    if settings.prompt or settings.chat:
        fields.append(pa.field(PROMPT, pa.int64(), nullable=False))
    return pa.schema(fields, metadata=metadata)


def check_schema(schema: pa.Schema, file: Location) -> None:
    """Check the format and the columns of a prepared corpus."""
    metadata = schema.metadata or {}
    version = metadata.get(FORMAT_KEY, b"").decode(errors="replace")
    if version != str(FORMAT_VERSION):
        what = "is no prepared corpus"
        if version:
            what = f"has format {version}, and this release reads {FORMAT_VERSION}"
        raise DataError(f"{file} {what}; prepare it with nxtrain data prepare")
    kinds = {TEXT: [pa.large_string()], IDS: [pa.large_list(item) for item in (pa.uint16(), pa.uint32())]}
    columns = {name: schema.field(name).type for name in schema.names}
    first, *others = schema.names or [""]
    holds_documents = any(_is_alike(kind, columns.get(first)) for kind in kinds.get(first, ()))
    if not holds_documents or (others and (others != [PROMPT] or columns[PROMPT] != pa.int64())):
        raise DataError(f"{file} has columns {columns}, not {IDS} or {TEXT}; prepare it again")


def _is_alike(wanted: Any, kind: Any) -> bool:
    """True for equal types, whatever the name of a list's items."""
    if kind is None or not pa.types.is_large_list(wanted):
        return bool(kind == wanted)
    return bool(pa.types.is_large_list(kind) and kind.value_type == wanted.value_type)
