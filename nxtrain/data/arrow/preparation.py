"""Preparation of a corpus: documents from many source files become one Arrow file, or shards, in bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from nxtrain.common.errors import ConfigError, DataError, StoppedBySignal
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
from nxtrain.data.arrow.rows import (
    BINARY,
    DEFECTS,
    LABELLED,
    PAIR,
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

MIN_SHARD_BYTES = 1 << 16

SHOWN_BAD = 5
"""Maximum number of skipped rows that are printed. The file of bad rows has all of them."""

OnBad = Literal["stop", "skip", "skip binary"]

ToArray: TypeAlias = Callable[[Sequence[bytes], Sequence[int]], tuple[pa.Array, Sequence[int]]]
"""Function that makes an Arrow array of documents and returns their prompt lengths, given prompt lengths in bytes."""

_EXAMPLES = {
    "--prompt": '{"prompt": "...", "text": "..."}',
    "--chat": '{"messages": [{"role": "user", "content": "..."}, ...]}',
    "--pairs": '{"prompt": "...", "chosen": "...", "rejected": "..."}',
    "--labels": '{"prompt": "...", "completion": "...", "label": true}',
}


@dataclass(frozen=True)
class PreparationRequest:
    """Arguments of a corpus preparation.

    Args:
        sources: Files and folders, objects and bucket prefixes, addresses of the Hub or their downloaded files.
        out: File to write, or folder of shards; its name ends in `.arrow`.
        lines: Each line of a text file is a document.
        only: Pattern that the names of a folder's files must match; empty for all files.
        tokenizer: Tokenizer that converts the text to ids; None for a corpus of text.
        shard_bytes: Size at which a shard ends; 0 for one file.
        restart: Delete an earlier result or unfinished work under the name of `out`.
        prompt: Field of the prompts, which precede the documents and are not targets; empty for none.
        chat: The field has conversations, which the tokenizer's chat template converts to text.
        pairs: Rows are pairs of answers, as strings, or as turns with `chat`.
        labels: Rows are labelled answers, as strings, or as turns with `chat`.
        mixed: A folder may contain text files next to other formats.
        sections: Text files are read in sections of at most `SECTION_BYTES`, which continue each other.
    """

    sources: Sequence[Location | HubAddress | HubFiles]
    out: Path
    field: str = "text"
    lines: bool = False
    only: str = ""
    tokenizer: Path | None = None
    shard_bytes: int = 0
    on_bad: OnBad = "stop"
    restart: bool = False
    prompt: str = ""
    chat: bool = False
    mixed: bool = False
    sections: bool = False
    pairs: bool = False
    labels: bool = False


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
    _check(request)
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
    _check_fields(request, sources)
    settings: dict[str, object] = {"field": request.field, "lines": request.lines, "tokenizer": ""}
    settings["shard_bytes"] = request.shard_bytes
    metadata: dict[bytes, bytes] = {}
    field = TEXT_FIELD
    to_array: ToArray = text_array
    chat: ChatTemplate | None = None
    if request.tokenizer:
        tokenizer = open_tokenizer(request.tokenizer)
        settings["tokenizer"], metadata[TOKENIZER_KEY] = tokenizer.digest, tokenizer.digest.encode()
        metadata[END_KEY], metadata[END_ID_KEY] = tokenizer.end.encode(), str(tokenizer.end_id).encode()
        if request.chat:
            chat = ChatTemplate(tokenizer)
            settings["chat"] = chat.digest
            tokenizer = with_special_tokens(tokenizer)
        if tokenizer.marks:
            settings["marks"] = tokenizer.marks
        if request.pairs:
            settings["pairs"], metadata[PAIRS_KEY] = True, b"1"
        if request.labels:
            settings["labels"] = True
        dtype = np.promote_types(tokenizer.dtype, np.uint16)
        field, to_array = ids_field(dtype), partial(ids_array, tokenizer, dtype)
    fields, extra = _form(request, chat)
    if request.prompt:
        settings["prompt"] = request.prompt
    if request.sections:
        settings["sections"] = True
    origin, settings_text = fingerprint(sources), json.dumps(settings, sort_keys=True)
    identity = {"sources": origin, "settings": settings_text}
    addresses = [f"{source.address}" for source in request.sources if isinstance(source, HubFiles)]
    if addresses:
        identity["origin"] = json.dumps(addresses)
        metadata[ORIGIN_KEY] = identity["origin"].encode()
    if outputs.out.exists():
        _compare_finished(outputs, identity)
        return PreparationOutcome(outputs, read_summary(outputs.summary), is_new=False)
    watcher.begin(summary(sources), sum(source.size for source in sources))
    begun = {**identity, "versions": versions(sources), "checksums": CHECKSUMS}
    schema = partial(schema_of, field=field, sources=origin, settings=settings_text, extra=extra, metadata=metadata)
    work = PreparationWork(outputs, begun, schema, request.shard_bytes)
    try:
        if work.is_complete:
            work.publish()
        else:
            work.open()
            _Copy(request, to_array, extra, work, watcher).run(sources, fields)
            work.finish({"format": FORMAT_VERSION, **work.counts.to_json(), **identity})
    except BaseException:
        if work.is_empty:  # nothing to go on from
            with suppress(OSError):
                outputs.clear_work()
        raise
    finally:
        work.close()
    return PreparationOutcome(outputs, read_summary(outputs.summary), is_new=True)


def _form(request: PreparationRequest, chat: ChatTemplate | None) -> tuple[Fields, tuple[str, ...]]:
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
    row, offset = position.row, position.offset
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
        to_array: ToArray,
        extra: Sequence[str],
        work: PreparationWork,
        watcher: Watcher,
    ) -> None:
        self._request, self._work = request, work
        self._watcher = watcher
        self._to_array, self._extra = to_array, extra
        self._texts, self._prompts = list[bytes](), list[int]()
        self._continued, self._labels = list[int](), list[int]()
        self._num_bytes = self._num_read = 0

    def run(self, sources: Sequence[Source], fields: Fields) -> None:
        """Write all documents; raise a DataError for sources without documents."""
        work, request = self._work, self._request
        counts = work.counts
        batch_bytes = min(BATCH_BYTES, request.shard_bytes or BATCH_BYTES)
        for number, source, row in source_rows(sources, fields, request.lines, work.position, self._note_read):
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
        array, lengths = self._to_array(self._texts, self._prompts)
        counts.documents += len(self._texts)
        counts.num_bytes += self._num_bytes
        if pa.types.is_large_list(array.type):
            counts.tokens += len(array.values)
        columns = {PROMPT: lengths, LABEL: self._labels, CONTINUES: self._continued}
        arrays = [array, *(pa.array(columns[name], pa.int64()) for name in self._extra)]
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


def _check(request: PreparationRequest) -> None:
    if request.out.suffix != ".arrow":
        raise ConfigError(f"--out {request.out} has another ending than .arrow; call it {request.out}.arrow")
    if 0 < request.shard_bytes < MIN_SHARD_BYTES:
        raise ConfigError(f"--shard-bytes {request.shard_bytes} is below {MIN_SHARD_BYTES:,}; give more")
    out = Path(os.path.realpath(request.out))
    for source in request.sources:
        if not isinstance(source, Path):
            continue
        real = Path(os.path.realpath(source))  # `Path.resolve` fails for a link to itself
        if out == real or (source.is_dir() and out.is_relative_to(real)):
            raise ConfigError(
                f"--out {request.out} lies in the source {source}, and would be read as a part of it; move it"
            )


def _check_fields(request: PreparationRequest, sources: Sequence[Source]) -> None:
    """Raise a ConfigError if prompts or conversations are requested from sources without fields."""
    if request.pairs and request.labels:
        raise ConfigError("--pairs and --labels: a row has two answers, or one with a label; give one of the two")
    for name, is_given, values in (("--pairs", request.pairs, PAIR), ("--labels", request.labels, LABELLED)):
        if is_given and (request.prompt or request.field != "text"):
            raise ConfigError(f"{name} reads the fields {', '.join((PROMPT, *values))}; leave --prompt and --field out")
        if is_given and request.tokenizer is None:
            raise ConfigError(f"{name} writes answers as ids; give the folder of their tokenizer with --tokenizer")
    if request.chat and request.prompt:
        raise ConfigError("--chat and --prompt: the turns before an answer are its prompt; give one of the two")
    if request.chat and request.tokenizer is None:
        raise ConfigError(
            "--chat converts conversations with a tokenizer's template, to ids; give its folder with --tokenizer"
        )
    if request.prompt == request.field:
        raise ConfigError(f"--prompt {request.prompt} and --field {request.field} are one field; name two")
    given = {"--pairs": request.pairs, "--labels": request.labels, "--chat": request.chat, "--prompt": request.prompt}
    option = next((name for name, value in given.items() if value), "")
    if not option:
        return
    for source in sources:
        if source.kind == "text":
            raise ConfigError(
                f"{option} names a field, and {source.path} is text without fields; "
                f"give JSON lines such as {_EXAMPLES[option]}, Parquet or Arrow"
            )


def _compare_finished(outputs: Outputs, identity: dict[str, str]) -> None:
    """Accept existing results of the same input, and delete a work folder that a killed process left."""
    first = outputs.out / shard_name(0) if outputs.out.is_dir() else outputs.out
    try:
        with pa.memory_map(str(first)) as mapped:
            metadata = pa.ipc.open_file(mapped).schema.metadata or {}
    except DEFECTS:
        metadata = {}
    if FORMAT_KEY not in metadata:
        raise DataError(f"{outputs.out} is no prepared corpus; choose another --out, or delete it with --restart")
    keys = {"sources": SOURCES_KEY, "settings": SETTINGS_KEY, "origin": ORIGIN_KEY}
    written = {name: metadata.get(keys[name], b"").decode(errors="replace") for name in identity}
    if written != identity:
        refuse(f"{outputs.out} is finished, and", written, identity)
    outputs.clear_work()
