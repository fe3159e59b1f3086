"""Columns of a prepared corpus: documents as text, or as token ids that end with the end-of-text id."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nxtrain.common.errors import ConfigError, DataError
from nxtrain.common.hf_files import TOKENIZER
from nxtrain.common.io.object_store import Location
from nxtrain.data.tokenization import ANCHOR, TextTokenizer, load_tokenizer

FORMAT_VERSION = 1

FORMAT_KEY = b"nxtrain.format"
SOURCES_KEY = b"nxtrain.sources"
SETTINGS_KEY = b"nxtrain.settings"
ORIGIN_KEY = b"nxtrain.origin"
TOKENIZER_KEY = b"nxtrain.tokenizer"
END_KEY = b"nxtrain.end_of_text"
END_ID_KEY = b"nxtrain.end_id"
SHARD_KEY = b"nxtrain.shard"
CHECKSUMS_KEY = b"nxtrain.checksums"
PAIRS_KEY = b"nxtrain.pairs"
"""Metadata key of a corpus of pairs: documents 2k and 2k + 1 are the chosen and the rejected answer of pair k."""

CHECKSUMS = "xxh3-64"
"""Value of the metadata key `CHECKSUMS_KEY`: kind of the file's checksums. Files of earlier releases lack the key."""

TEXT = "text"
IDS = "ids"
PROMPT = "prompt"
LABEL = "label"
CONTINUES = "continues"
"""Names of the columns after the documents.

`prompt` has the length of each document's prompt, in bytes or tokens. `continues` has 1 for a section of a text file
that continues in the next document, else 0. `label` follows `prompt`, and has 1 for a desirable answer, else 0.
"""

FURTHER_COLUMNS = ((), (PROMPT,), (PROMPT, LABEL), (CONTINUES,))
"""Combinations of number columns that a corpus may have after its documents."""

TEXT_FIELD = pa.field(TEXT, pa.large_string(), nullable=False)

SECTION_CHARS = 1 << 20
"""Maximum characters that are encoded in one call. Longer documents are cut at line ends, which bounds the memory."""

Ids = np.ndarray[tuple[int], np.dtype[np.uint32]]

_ENCODE_CHARS = 1 << 20  # an encoding takes some 100 bytes a token

_ANY_VOCABULARY = 1 << 32


def ids_field(dtype: np.dtype[Any]) -> pa.Field:
    """Arrow field of documents as lists of token ids."""
    return pa.field(IDS, pa.large_list(pa.field("item", pa.from_numpy_dtype(dtype), nullable=False)), nullable=False)


def text_array(texts: Sequence[bytes], prompts: Sequence[int]) -> tuple[pa.Array, Sequence[int]]:
    """Arrow array of UTF-8 documents, already validated, and the length of their prompts in bytes."""
    ends = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=ends[1:])
    content = pa.py_buffer(b"".join(texts))
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(ends), content), prompts


def ids_array(
    tokenizer: TextTokenizer, dtype: np.dtype[Any], texts: Sequence[bytes], prompts: Sequence[int]
) -> tuple[pa.Array, Sequence[int]]:
    """Arrow array of documents as token ids, including begin and end tokens, and the lengths of prompts in tokens."""
    encoded = list(encode_prompted(tokenizer, texts, prompts))
    return list_array([ids for ids, _ in encoded], dtype), [num_tokens for _, num_tokens in encoded]


def list_array(documents: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> pa.Array:
    """Arrow array of documents, given as arrays of token ids."""
    ends = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([ids.size for ids in documents], out=ends[1:])
    values = np.concatenate([np.empty(0, dtype), *documents], dtype=dtype, casting="same_kind")
    return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(values), type=ids_field(dtype).type)


def encode_prompted(
    tokenizer: TextTokenizer, texts: Sequence[bytes], prompts: Sequence[int], continues: Sequence[bool] = ()
) -> Iterator[tuple[Ids, int]]:
    """Token ids of each document, with the ids of its beginning and end, and the number of tokens of its prompt.

    A prompt and its answer are encoded separately, so that no token spans both. The answer continues the prompt's text.

    Args:
        continues: True for a text that continues the document of the text before; empty for none.
    """
    before = [text[:length] for text, length in zip(texts, prompts, strict=True)]
    contexts = before
    if any(continues):
        contexts = [ANCHOR.encode() if is_next else prompt for prompt, is_next in zip(before, continues, strict=True)]
    answers = encode(tokenizer, [text[length:] for text, length in zip(texts, prompts, strict=True)], contexts)
    if not any(prompts):
        yield from ((ids, 0) for ids in answers)
        return
    for prompt, begin, answer in zip(before, encode(tokenizer, before), answers, strict=True):
        if prompt:
            yield np.concatenate([begin[:-1], answer]), begin.size - 1
        else:
            yield answer, 0


def encode(tokenizer: TextTokenizer, texts: Sequence[bytes], before: Sequence[bytes] = ()) -> Iterator[Ids]:
    """Token ids of each UTF-8 document, with the ids of its beginning and end; many documents are encoded at once.

    Args:
        before: Text before each document, which the document continues, or nothing; empty for none.
    """
    begin, end = np.array(tokenizer.begin, np.uint32), np.array([tokenizer.end_id], np.uint32)
    contexts = before or [b""] * len(texts)
    continued = iter(contexts)
    held: list[Ids] = []
    for batch in _batches(tokenizer, texts, contexts):
        for ids, (_, _, is_last) in zip(_encoded(tokenizer, batch), batch, strict=True):
            held.append(ids)
            if is_last:
                first = [] if next(continued) else [begin]
                yield np.concatenate([*first, *held, end])
                held.clear()


class _Section(NamedTuple):
    """Part of a document that is encoded in one call.

    Args:
        anchor: Text to encode before it, whose ids are removed.
        is_last: It is the last part of its document.
    """

    anchor: str
    text: str
    is_last: bool


def _encoded(tokenizer: TextTokenizer, sections: Sequence[_Section]) -> Iterator[Ids]:
    """Token ids of each section, without those of its anchor."""
    texts = [section.anchor + section.text for section in sections]
    encode_all = tokenizer.tokenizer.encode_batch_fast
    if any(section.anchor for section in sections):
        encode_all = tokenizer.tokenizer.encode_batch  # with the position of each token
    for encoding, section in zip(encode_all(texts, add_special_tokens=False), sections, strict=True):
        ids = encoding.ids
        if section.anchor:
            ids = ids[_num_of_anchor(encoding.offsets, section.anchor) :]
        yield np.frombuffer(array("I", ids), np.uint32)  # three times as fast as numpy.array


def _num_of_anchor(offsets: Sequence[tuple[int, int]], anchor: str) -> int:
    """Number of ids that belong to the anchor before a text, given the beginning and the end of each token."""
    num_ids = 0
    for begin, end in offsets:
        # One id may stand for several unknown characters, also of the text. A token's name may take in the next spaces.
        if end > len(anchor) and (begin >= len(anchor) or anchor == ANCHOR):
            break
        num_ids += 1
    return num_ids


def _batches(tokenizer: TextTokenizer, texts: Sequence[bytes], before: Sequence[bytes]) -> Iterator[list[_Section]]:
    """Split documents into sections, grouped in batches of bounded size."""
    batch: list[_Section] = []
    num_chars = 0
    for content, context in zip(texts, before, strict=True):
        text, end = content.decode(), 0
        anchor = ""
        if context:
            anchor = tokenizer.anchor(context.decode())
        while True:
            start, end = end, len(text)
            if end - start > SECTION_CHARS:
                end = text.rfind("\n", start, start + SECTION_CHARS) + 1 or start + SECTION_CHARS
            section = text[start:end]
            batch.append(_Section(anchor, section, end == len(text)))
            num_chars += end - start
            if num_chars >= _ENCODE_CHARS:
                yield batch
                batch, num_chars = [], 0
            if end == len(text):
                break
            anchor = tokenizer.anchor(section)
    if batch:
        yield batch


def open_tokenizer(folder: Path) -> TextTokenizer:
    """Load the tokenizer given by --tokenizer."""
    file = folder / TOKENIZER if folder.is_dir() else folder
    if not file.exists():
        raise ConfigError(f"--tokenizer: {file} does not exist; give a folder with {TOKENIZER}, or the file")
    try:
        return load_tokenizer(file, _ANY_VOCABULARY)
    except DataError as error:
        raise DataError(f"{error}".replace("data.tokenizer", "--tokenizer", 1)) from error


def schema_of(
    shard: int,
    *,
    field: pa.Field,
    sources: str,
    settings: str = "",
    extra: Sequence[str] = (),
    metadata: Mapping[bytes, bytes] | None = None,
) -> pa.Schema:
    """Arrow schema of a shard; its metadata has the format version, the sources and the settings.

    Args:
        settings: Settings that, with the sources, determine the bytes of the corpus, as JSON.
        shard: Number of the shard.
        field: Field of the documents.
        sources: Fingerprint of the sources.
        extra: Names of the further columns, one of `FURTHER_COLUMNS`.
        metadata: Further metadata.
    """
    entries = {
        FORMAT_KEY: str(FORMAT_VERSION).encode(),
        SOURCES_KEY: sources.encode(),
        SETTINGS_KEY: settings.encode(),
        SHARD_KEY: str(shard).encode(),
        CHECKSUMS_KEY: CHECKSUMS.encode(),
        **(metadata or {}),
    }
    further = [pa.field(name, pa.int64(), nullable=False) for name in extra]
    return pa.schema([field, *further], metadata=entries)


def check_schema(schema: pa.Schema, file: Location) -> None:
    """Raise a DataError unless a schema has the format and the columns of a prepared corpus."""
    metadata = schema.metadata or {}
    version = metadata.get(FORMAT_KEY, b"").decode(errors="replace")
    if version != str(FORMAT_VERSION):
        what = "is not a prepared corpus"
        if version:
            what = f"has format {version}, and this release reads {FORMAT_VERSION}"
        raise DataError(f"{file} {what}; prepare it with nxtrain data prepare")
    columns = {name: schema.field(name).type for name in schema.names}
    first, *others = schema.names or [""]
    kind: Any = columns.get(first)
    is_text = first == TEXT and pa.types.is_large_string(kind)
    is_ids = first == IDS and pa.types.is_large_list(kind) and kind.value_type in {pa.uint16(), pa.uint32()}
    has_numbers = tuple(others) in FURTHER_COLUMNS and all(columns[name] == pa.int64() for name in others)
    if not (is_text or is_ids) or not has_numbers:
        raise DataError(f"{file} has columns {columns}, not {IDS} or {TEXT}; prepare it again")
