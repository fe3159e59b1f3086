"""Preparation of a corpus: documents from many source files become one Arrow file, or shards, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from nxtrain.common.errors import DataError, StoppedBySignal
from nxtrain.common.io.object_store import Location
from nxtrain.data.arrow.chat import ChatTemplate, with_special_tokens
from nxtrain.data.arrow.columns import (
    CHECKSUMS,
    CONTINUES,
    END_ID_KEY,
    END_KEY,
    FORMAT_KEY,
    FORMAT_VERSION,
    LABEL,
    ORIGIN_KEY,
    PAIRS_KEY,
    PROMPT,
    SETTINGS_KEY,
    SOURCES_KEY,
    TEXT_FIELD,
    TOKENIZER_KEY,
    ids_array,
    ids_field,
    open_tokenizer,
    schema_of,
    text_array,
)
from nxtrain.data.arrow.hub_files import HubAddress, HubFiles
from nxtrain.data.arrow.preferences import AnswerWriter
from nxtrain.data.arrow.preparation_request import PreparationRequest, check_fields, check_output
from nxtrain.data.arrow.rows import (
    BINARY,
    DEFECTS,
    LABELLED,
    TOOLS,
    BadRow,
    Fields,
    ReadProgress,
    SourceRow,
    is_blank,
    text_rows,
)
from nxtrain.data.arrow.sources import Source, find_sources, fingerprint, summary, versions
from nxtrain.data.arrow.tables import table_rows
from nxtrain.data.arrow.work import (
    Counts,
    Outputs,
    Position,
    PreparationWork,
    read_summary,
    recorded_origin,
    refuse,
    shard_name,
)
from nxtrain.data.storage import open_file

BATCH_BYTES = 8 << 20
"""Bytes of text in a record batch."""

BATCH_ROWS = 1 << 17
"""Maximum number of documents in a record batch, since short documents take more memory than their text."""

SHOWN_BAD = 5
"""Maximum number of skipped rows that are printed. The file of bad rows has all of them."""

ToArray: TypeAlias = Callable[[Sequence[bytes], Sequence[int]], tuple[pa.Array, Sequence[int]]]
"""Function that makes an Arrow array of documents and returns their prompt lengths, given prompt lengths in bytes."""


class Watcher:
    """Observer of a corpus preparation; a method that a subclass does not override does nothing."""

    def begin(self, what: str, num_bytes: int) -> None:
        """Called once the sources are known, with their number by format and their total bytes."""

    def advance(self, num_bytes: int, counts: Counts) -> None:
        """Called after each written batch; `num_bytes` of the sources have been read."""

    def print_line(self, line: str) -> None:
        """Print a line before the preparation begins."""

    def bad(self, text: str) -> None:
        """Report a skipped row."""

    def asked_to_stop(self) -> str:
        """Name of the signal that requests a stop; empty if there was none."""
        return ""


@dataclass(frozen=True)
class PreparationOutcome:
    """Result of a corpus preparation.

    Args:
        is_new: False if an earlier call finished the same preparation.
    """

    outputs: Outputs
    summary: dict[str, Any]
    is_new: bool


def prepare_corpus(request: PreparationRequest, watcher: Watcher) -> PreparationOutcome:
    """Prepare a corpus from source files; a killed preparation of the same request continues, with identical bytes.

    Raises:
        ConfigError: The arguments contradict each other or the sources.
        DataError: A bad row under the policy `stop`, an unknown format, no document at all, or results of other input.
        StorageError: The storage fails.
        StoppedBySignal: A signal requested a stop.
    """
    check_output(request)
    if request.restart:
        Outputs(request.out).clear()
    recorded = recorded_origin(Outputs(request.out))
    located: list[Location | HubFiles] = []
    for source in request.sources:
        if isinstance(source, HubAddress):
            located.append(source.fetch(request.only, recorded, watcher.print_line))
        else:
            located.append(source)
    request = replace(request, sources=located)
    return prepare_sources(request, find_sources(located, request.only, request.mixed), watcher)


def prepare_sources(request: PreparationRequest, sources: Sequence[Source], watcher: Watcher) -> PreparationOutcome:
    """Prepare a corpus from files whose format is known already; raises the errors of `prepare_corpus`."""
    outputs = Outputs(request.out)
    check_fields(request, sources)
    form = _form_of(request)
    origin = fingerprint(sources)
    settings = json.dumps(form.settings, sort_keys=True)
    identity = {"sources": origin, "settings": settings}
    addresses = [f"{source.address}" for source in request.sources if isinstance(source, HubFiles)]
    if addresses:
        identity["origin"] = json.dumps(addresses)
        form.metadata[ORIGIN_KEY] = identity["origin"].encode()
    if outputs.out.exists():
        _compare_finished(outputs, identity)
        return PreparationOutcome(outputs, read_summary(outputs.summary), is_new=False)
    watcher.begin(summary(sources), sum(source.size for source in sources))
    begun = {**identity, "versions": versions(sources), "checksums": CHECKSUMS}
    schema = partial(
        schema_of, field=form.field, sources=origin, settings=settings, extra=form.extra, metadata=form.metadata
    )
    work = PreparationWork(outputs, begun, schema, request.shard_bytes)
    try:
        if work.is_complete:
            work.publish()
        else:
            work.open()
            _Copy(request, form, work, watcher).run(sources)
            work.finish({"format": FORMAT_VERSION, **work.counts.to_json(), **identity})
    except BaseException:
        if work.is_empty:  # nothing to go on from
            with suppress(OSError):
                outputs.clear_work()
        raise
    finally:
        work.close()
    return PreparationOutcome(outputs, read_summary(outputs.summary), is_new=True)


@dataclass(frozen=True)
class _CorpusForm:
    """Form of a corpus: its settings and columns, and the fields of the source rows.

    Args:
        settings: Settings that determine the documents, by name.
        metadata: Metadata of the corpus's schema.
        field: Column of the documents.
        to_array: Converts documents to an array of this column.
        fields: Fields to read from each source row.
        extra: Names of the further columns.
    """

    settings: dict[str, object]
    metadata: dict[bytes, bytes]
    field: pa.Field
    to_array: ToArray
    fields: Fields
    extra: tuple[str, ...]


def _form_of(request: PreparationRequest) -> _CorpusForm:
    settings: dict[str, object] = {
        "field": request.field,
        "lines": request.lines,
        "tokenizer": "",
        "shard_bytes": request.shard_bytes,
    }
    if request.prompt:
        settings["prompt"] = request.prompt
    if request.sections:
        settings["sections"] = True
    if not request.tokenizer:
        return _CorpusForm(settings, {}, TEXT_FIELD, text_array, *_columns_of(request, None))
    tokenizer = open_tokenizer(request.tokenizer)
    settings["tokenizer"] = tokenizer.digest
    metadata = {
        TOKENIZER_KEY: tokenizer.digest.encode(),
        END_KEY: tokenizer.end.encode(),
        END_ID_KEY: str(tokenizer.end_id).encode(),
    }
    chat: ChatTemplate | None = None
    if request.chat:
        chat = ChatTemplate(tokenizer)
        settings["chat"] = chat.digest
        tokenizer = with_special_tokens(tokenizer)
    if tokenizer.marks:
        settings["marks"] = tokenizer.marks
    if request.pairs:
        settings["pairs"] = True
        metadata[PAIRS_KEY] = b"1"
    if request.labels:
        settings["labels"] = True
    dtype = np.promote_types(tokenizer.dtype, np.uint16)
    to_array = partial(ids_array, tokenizer, dtype)
    return _CorpusForm(settings, metadata, ids_field(dtype), to_array, *_columns_of(request, chat))


def _columns_of(request: PreparationRequest, chat: ChatTemplate | None) -> tuple[Fields, tuple[str, ...]]:
    """Fields to read from each row, and the names of the corpus's further columns."""
    tools = TOOLS if chat else ""
    if request.pairs:
        return Fields("", PROMPT, answers=AnswerWriter(chat).pair, tools=tools), (PROMPT,)
    if request.labels:
        return Fields("", PROMPT, answers=AnswerWriter(chat).labelled, values=LABELLED, tools=tools), (PROMPT, LABEL)
    if chat is not None:
        return Fields(request.field, chat=chat.documents, tools=tools), (PROMPT,)
    fields = Fields(request.field, request.prompt, sections=request.sections)
    if request.sections:
        return fields, (CONTINUES,)
    return fields, (PROMPT,) if request.prompt else ()


def source_rows(
    sources: Sequence[Source],
    fields: Fields,
    lines: bool,
    position: Position,
    progress: ReadProgress,
) -> Iterator[tuple[int, Source, SourceRow | BadRow]]:
    """Iterate over the rows of all sources after a position, each with the index of its source.

    Args:
        position: Position after the last row to skip.
    """
    passed = sum(source.size for source in sources[: position.source])
    row = position.row
    offset = position.offset
    for number, source in islice(enumerate(sources), position.source, None):
        of_file = partial(_add, progress, passed)
        if source.kind in {"text", "jsonl"}:
            rows = text_rows(source, fields, lines, (row, offset), of_file)
        else:
            rows = table_rows(source, fields, row, of_file)
        for document in rows:
            yield number, source, document
        row = offset = 0
        passed += source.size
        if open_file(source.path, None).version() != source.version:
            reason = "changed while it was read; begin again when no process writes to it: data prepare with --restart"
            raise DataError(f"{source.path} {reason}")


def _add(progress: ReadProgress, passed: int, num_bytes: int) -> None:
    progress(passed + num_bytes)


class _Copy:
    """Copy of the documents of all sources into record batches, from the position of the unfinished preparation."""

    def __init__(
        self,
        request: PreparationRequest,
        form: _CorpusForm,
        work: PreparationWork,
        watcher: Watcher,
    ) -> None:
        self._request = request
        self._form = form
        self._work = work
        self._watcher = watcher
        # Documents of the next record batch.
        self._texts: list[bytes] = []
        self._prompts: list[int] = []
        self._continued: list[int] = []
        self._labels: list[int] = []
        self._num_bytes = 0
        self._num_read = 0

    def run(self, sources: Sequence[Source]) -> None:
        """Write all documents; raise a DataError for sources without documents."""
        work, request = self._work, self._request
        counts = work.counts
        batch_bytes = min(BATCH_BYTES, request.shard_bytes or BATCH_BYTES)
        for number, source, row in source_rows(
            sources, self._form.fields, request.lines, work.position, self._note_read
        ):
            if isinstance(row, BadRow):
                self._skip(source, row)
                continue
            counts.rows += row.is_last
            if is_blank(row.text[row.prompt :]):
                counts.empty += 1
                continue
            self._texts.append(row.text)
            self._prompts.append(row.prompt)
            self._continued.append(int(row.continues))
            self._labels.append(int(row.is_desirable))
            self._num_bytes += len(row.text)
            # A position is after a whole row: all documents of a conversation go into one batch.
            if row.is_last and (self._num_bytes >= batch_bytes or len(self._texts) >= BATCH_ROWS):
                self._write(Position(number, row.row, row.offset))
        if self._texts:
            # Bad and empty rows may follow the last document: the position after all sources counts them too.
            self._write(Position(len(sources)))
        if not counts.documents:
            skipped = ""
            if counts.skipped:
                skipped = f", {sum(counts.skipped.values()):,} bad rows: {dict(counts.skipped)}"
            raise DataError(
                f"the sources hold no document: {counts.rows:,} rows, {counts.empty:,} of them empty{skipped}; "
                "look at the files and at --field"
            )

    def _note_read(self, num_bytes: int) -> None:
        self._num_read = num_bytes

    def _write(self, position: Position) -> None:
        counts = self._work.counts
        array, lengths = self._form.to_array(self._texts, self._prompts)
        counts.documents += len(self._texts)
        counts.num_bytes += self._num_bytes
        if pa.types.is_large_list(array.type):
            counts.tokens += len(array.values)
        columns = {PROMPT: lengths, LABEL: self._labels, CONTINUES: self._continued}
        arrays = [array, *(pa.array(columns[name], pa.int64()) for name in self._form.extra)]
        self._work.add_batch(arrays, position)
        for values in (self._texts, self._prompts, self._continued, self._labels):
            values.clear()
        self._num_bytes = 0
        self._watcher.advance(self._num_read, counts)
        name = self._watcher.asked_to_stop()
        if name:
            raise StoppedBySignal(f"stopped by {name}; the same command continues after {counts.documents:,} documents")

    def _skip(self, source: Source, bad: BadRow) -> None:
        """Count and record bad rows if they may be skipped; otherwise raise a DataError."""
        first = bad.row - bad.num_rows + 1
        rows = f"row {first:,}" if bad.num_rows == 1 else f"rows {first:,} to {bad.row:,}"
        text = f"{source.path}, {rows}: {bad.reason}: {bad.detail}"
        if self._request.on_bad == "stop":
            raise DataError(
                f"{text}\n    to skip and count such rows, repeat the command with --on-bad skip, which continues here"
            )
        if self._request.on_bad == "skip binary" and bad.reason != BINARY:
            raise DataError(text)
        counts = self._work.counts
        counts.rows += bad.num_rows
        shown = sum(counts.skipped.values())
        counts.skipped[bad.reason] += bad.num_rows
        self._work.add_bad(
            {"file": str(source.path), "row": first, "rows": bad.num_rows, "reason": bad.reason, "detail": bad.detail}
        )
        if shown < SHOWN_BAD:
            self._watcher.bad(text)


def _compare_finished(outputs: Outputs, identity: dict[str, str]) -> None:
    """Accept existing results of the same input, and delete a work folder that a killed process left."""
    first = outputs.out / shard_name(0) if outputs.out.is_dir() else outputs.out
    try:
        with pa.memory_map(str(first)) as mapped:
            metadata = pa.ipc.open_file(mapped).schema.metadata or {}
    except DEFECTS:
        metadata = {}
    if FORMAT_KEY not in metadata:
        raise DataError(f"{outputs.out} is not a prepared corpus; choose another --out, or delete it with --restart")
    keys = {"sources": SOURCES_KEY, "settings": SETTINGS_KEY, "origin": ORIGIN_KEY}
    written = {name: metadata.get(keys[name], b"").decode(errors="replace") for name in identity}
    if written != identity:
        refuse(f"{outputs.out} is finished, and", written, identity)
    outputs.clear_work()
