"""Prepared corpora, opened for reading: random access to any document with two reads of its file."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.common.io.object_store import Location
from nxtrain.common.text import indented
from nxtrain.data.arrow.columns import (
    CONTINUES,
    IDS,
    LABEL,
    PAIRS_KEY,
    PROMPT,
    SETTINGS_KEY,
    SHARD_KEY,
    SOURCES_KEY,
    TOKENIZER_KEY,
)
from nxtrain.data.arrow.opening import StoredBatch, open_shard
from nxtrain.data.arrow.seal import CheckedFile, DamagedBlockError
from nxtrain.data.arrow.work import read_summary, shard_name
from nxtrain.data.storage import DataFile, open_file, read_exactly, shards, summary_of, unreadable

"""Damaged blocks that a message lists."""


class PreparedCorpus:
    """Documents of a prepared corpus: a file, or a folder of shards, on a disk or in object storage.

    Args:
        cache: Folder on this node's disk that caches blocks from object storage.

    Attributes:
        files: The file, or all shards in order.
        is_ids: Documents are token ids; otherwise text.
        has_prompts: Documents begin with a prompt, which is not a target.
        has_pairs: Documents are answers, two for each pair.
        has_labels: Documents are answers, each desirable or not.
        has_conversations: Documents are answers of conversations; each repeats the earlier turns in its prompt.
        dtype: Integer type of the ids; bytes for text.
        tokenizer: Digest of the tokenizer that made the ids; empty for text.
        num_bytes: Total bytes of the files.
        value_bytes: Total bytes of all documents.
        has_checksums: All reads are verified. Files of earlier releases have no checksums.

    Raises:
        DataError: The path is not a prepared corpus, is damaged, or lacks shards.
        StorageError: The storage fails.
    """

    def __init__(self, path: Location, cache: Path = Path()) -> None:
        self.path = path
        self.files: list[DataFile] = [open_file(shard, cache) for shard in shards(path)]
        if not self.files:
            raise DataError(
                f"{path} holds no shard such as {shard_name(0)}; prepare a corpus with nxtrain data prepare"
            )
        self._batches: list[StoredBatch] = []
        schemas = []
        for number, file in enumerate(self.files):
            schema, batches, opened = open_shard(file, number)
            self.files[number] = opened
            schemas.append(schema)
            self._batches += batches
        self._begins = np.cumsum([0, *(batch.rows for batch in self._batches)]).tolist()
        self._value_begins = np.cumsum([0, *(batch.size for batch in self._batches)]).tolist()
        self.metadata: dict[bytes, bytes] = dict(schemas[0].metadata)
        self._check_shards(schemas)
        self.tokenizer = self.metadata.get(TOKENIZER_KEY, b"").decode(errors="replace")
        self.num_bytes = sum(file.num_bytes for file in self.files)
        self.value_bytes = int(self._value_begins[-1])
        self.has_checksums = all(isinstance(file, CheckedFile) for file in self.files)
        kind = schemas[0].field(0).type
        self.is_ids = schemas[0].names[0] == IDS
        self.has_prompts = PROMPT in schemas[0].names
        self.has_pairs = PAIRS_KEY in self.metadata
        self.has_labels = LABEL in schemas[0].names
        self.has_conversations = _is_of_conversations(self.metadata) and self.is_ids and self.has_prompts
        self._has_sections = CONTINUES in schemas[0].names
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        if self.is_ids:
            self.dtype = np.dtype(str(kind.value_type))  # to_pandas_dtype of pyarrow 18 imports pandas

    def __len__(self) -> int:
        """Number of documents."""
        return int(self._begins[-1])

    def ids(self, document: int) -> NDArray[np.unsignedinteger[Any]]:
        """Token ids of a document, with the end-of-text id at the end."""
        return np.frombuffer(self._read(document), self.dtype)

    def prompt(self, document: int, content: bytes) -> int:
        """Length of a document's prompt, in bytes of text or in tokens; 0 in a corpus without prompts."""
        if not self.has_prompts:
            return 0
        length = self._extra(document)
        size = len(content) // self.dtype.itemsize
        is_inside = not self.is_ids and 0 <= length < size and content[length] & 0xC0 == 0x80  # noqa: PLR2004 - UTF-8
        if not 0 <= length <= size or is_inside:
            self._damaged(document, f"its prompt has a length of {length:,}, and all of it {size:,}")
        return length

    def continues(self, document: int) -> bool:
        """True for a section of a text file that continues in the next document."""
        return self._has_sections and self._extra(document) != 0

    def split_content(self, document: int, content: bytes) -> bytes:
        """Content whose hash assigns a document to a side of the split: of the first answer of its conversation."""
        if not self.has_conversations:
            return content
        first, prompt = document, self._prompt_ids(document, content)
        while first:
            before = self.content(first - 1)
            earlier = self._prompt_ids(first - 1, before)
            # The last token of the earlier prompt may be merged with the beginning of the answer.
            num_shared = earlier.size - 1
            if num_shared < 1 or earlier.size >= prompt.size or (earlier[:-1] != prompt[:num_shared]).any():
                break
            first, prompt = first - 1, earlier
            content = before
        return content

    @cached_property
    def identity(self) -> str:
        """Hash that identifies the documents: of the sources, the settings, the batch sizes, and any checksums."""
        digest = hashlib.blake2b(digest_size=16)
        for key in (SOURCES_KEY, SETTINGS_KEY, TOKENIZER_KEY):
            digest.update(self.metadata.get(key, b"") + b"\0")
        digest.update(repr([(batch.rows, batch.size) for batch in self._batches]).encode())
        if self.has_checksums:  # sources are compared by samples of their content, and these are of all of it
            digest.update(self.checksum.encode())
        return digest.hexdigest()

    @property
    def checksum(self) -> str:
        """Checksum of the whole content, for a corpus with checksums."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            assert isinstance(file, CheckedFile)
            digest.update(file.table())
        return digest.hexdigest()

    def expect(self, documents: Iterable[int]) -> None:
        """Begin to prefetch documents from object storage that are read soon; do nothing for a disk."""
        for document in documents:
            self._file_of(document).ahead(self._read, document)

    def content(self, document: int) -> bytes:
        """Stored bytes of a document: its ids, or its text in UTF-8."""
        content = self._read(document)
        if not self.is_ids:
            try:
                content.decode()
            except UnicodeDecodeError as error:
                self._damaged(document, f"its text is not UTF-8: {error}")
        return content

    def text(self, document: int) -> str:
        """Text of a document."""
        return self.content(document).decode()

    def values(self, start: int, size: int) -> bytes:
        """Stored bytes of a range of adjacent documents.

        Args:
            start: Offset among the bytes of all documents.
            size: Number of bytes, which must exist.
        """
        content = b""
        while len(content) < size:
            position = start + len(content)
            number = bisect_right(self._value_begins, position) - 1
            batch, offset = self._batches[number], position - self._value_begins[number]
            taken = min(size - len(content), batch.size - offset)
            content += self._pread(batch.file, batch.values + offset, taken, self._begins[number])
        return content

    def forget_changed(self) -> None:
        """Verify the blocks of a file again if it was modified since the last call."""
        for file in self.files:
            if isinstance(file, CheckedFile):
                file.forget_changed()

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Iterate over the document lengths of each batch, in tokens of ids or in bytes of text."""
        for batch, begin in zip(self._batches, self._begins, strict=False):
            raw = bytes(8)
            if batch.rows:
                raw = self._pread(batch.file, batch.offsets, 8 * (batch.rows + 1), begin)
            offsets = np.frombuffer(raw, np.int64)
            lengths = np.diff(offsets)
            if offsets[0] < 0 or (lengths < 0).any() or offsets[-1] > batch.size // self.dtype.itemsize:
                self._damaged(begin, "the offsets of its batch descend, or point outside of the batch")
            yield lengths

    def labels(self) -> NDArray[np.bool_]:
        """Labels of all documents in a corpus with labels, True for a desirable answer: (documents,)."""
        parts = [np.empty(0, np.int64)]
        for batch, begin in zip(self._batches, self._begins, strict=False):
            if batch.rows:
                parts.append(np.frombuffer(self._pread(batch.file, batch.extra[1], 8 * batch.rows, begin), np.int64))
                if not np.isin(parts[-1], (0, 1)).all():
                    self._damaged(begin, "a label of its batch is neither 0 nor 1")
        return np.concatenate(parts).astype(np.bool_)

    def _prompt_ids(self, document: int, content: bytes) -> NDArray[np.unsignedinteger[Any]]:
        return np.frombuffer(content, self.dtype)[: self.prompt(document, content)]

    def _batch_of(self, document: int) -> tuple[StoredBatch, int]:
        """Record batch that contains a document, and the document's row in that batch."""
        number = bisect_right(self._begins, document) - 1
        return self._batches[number], document - self._begins[number]

    def _extra(self, document: int) -> int:
        """Value of a document in the first number column."""
        batch, row = self._batch_of(document)
        return int(np.frombuffer(self._pread(batch.file, batch.extra[0] + 8 * row, 8, document), np.int64)[0])

    def _read(self, document: int) -> bytes:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self):,}")
        batch, row = self._batch_of(document)
        offsets = np.frombuffer(self._pread(batch.file, batch.offsets + 8 * row, 16, document), np.int64)
        begin, end = (offsets * self.dtype.itemsize).tolist()
        if not 0 <= begin <= end <= batch.size:
            self._damaged(document, f"it lies from byte {begin:,} to {end:,} of a batch of {batch.size:,} bytes")
        return self._pread(batch.file, batch.values + begin, end - begin, document)

    def _pread(self, file: int, start: int, size: int, document: int) -> bytes:
        try:
            content = read_exactly(self.files[file], size, start)
        except OSError as error:
            raise unreadable(f"{self.files[file].name}, document {document:,},", error) from error
        except DamagedBlockError as error:
            raise DataError(f"{self._description(file, error)}; prepare it again") from error
        if len(content) < size:
            self._damaged(document, "the file is shorter than when it was opened")
        return bytes(content)

    def verify(self, progress: Callable[[int], None]) -> None:
        """Verify every byte of the files against the checksums."""
        damages: list[str] = []
        done = 0
        for number, file in enumerate(self.files):
            assert isinstance(file, CheckedFile)
            try:
                for num_bytes, damage in file.verified():
                    done += num_bytes
                    progress(done)
                    if damage is not None:
                        damages.append(self._description(number, damage))
            except OSError as error:
                raise unreadable(f"{file.name}", error) from error
        if damages:
            lines = indented(damages)
            raise DataError(f"{self.path} has {len(damages):,} damaged blocks; prepare it again:{lines}")

    def _description(self, file: int, damage: DamagedBlockError) -> str:
        """Description of a damaged block for messages: the file, the block, and the documents in it."""
        inside = [
            number
            for number, batch in enumerate(self._batches)
            if batch.file == file and batch.offsets < damage.stop and damage.start < batch.stop
        ]
        documents = "no document"
        if inside:
            documents = f"documents {self._begins[inside[0]]:,} to {self._begins[inside[-1] + 1] - 1:,}"
        return (
            f"{self.files[file].name} is damaged: bytes {damage.start:,} to {damage.stop:,}, in a batch with "
            f"{documents}, are not what was written"
        )

    def name_of(self, document: int) -> str:
        """File name and number of a document, for messages."""
        return f"{self._file_of(document).name}, document {document:,} of {len(self):,}"

    def _file_of(self, document: int) -> DataFile:
        number = bisect_right(self._begins, document) - 1
        return self.files[self._batches[min(number, len(self._batches) - 1)].file]

    def _damaged(self, document: int, what: str) -> NoReturn:
        raise DataError(f"{self.name_of(document)}, is damaged: {what}; prepare it again")

    def _check_shards(self, schemas: list[Any]) -> None:
        """Raise a DataError for shards of several corpora, or for missing shards."""
        if self.files[0].name == self.path:
            return
        present = [(schema.metadata.get(SOURCES_KEY), schema.metadata.get(SHARD_KEY)) for schema in schemas]
        wanted = [(present[0][0], str(number).encode()) for number in range(len(present))]
        expected = read_summary(summary_of(self.path)).get("shards", len(present))
        if present != wanted or expected != len(present):
            raise DataError(
                f"{self.path} holds {len(present)} shards of {expected}, or shards of several corpora; "
                "bring all shards of one preparation, or prepare it again"
            )


def _is_of_conversations(metadata: dict[bytes, bytes]) -> bool:
    """True for documents made by `--chat` alone; pairs and labelled answers have one row for each answer."""
    try:
        settings = json.loads(metadata.get(SETTINGS_KEY, b"") or b"{}")
    except ValueError:
        return False
    return isinstance(settings, dict) and "chat" in settings and not {"pairs", "labels"} & settings.keys()
