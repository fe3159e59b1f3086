"""Work folder of a corpus preparation: shards, bad rows and a journal, from which a killed preparation continues.

The journal has a line for each batch that is complete on the disk. A start truncates every file to the length in the
last line, and reads the sources from the position in that line. Equal sources therefore give equal bytes, even after
kills.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from nxtrain.common.errors import DataError
from nxtrain.common.io.atomic import replace_bytes, replace_text, sync_folder
from nxtrain.common.io.jsonl import append, parse, read
from nxtrain.common.io.object_store import Location, content_of
from nxtrain.common.io.regular import read_bytes
from nxtrain.data.arrow import ipc
from nxtrain.data.arrow.ipc import Block
from nxtrain.data.arrow.seal import BLOCK_BYTES, ENTRY_BYTES, Sealing

_JOURNAL = "journal.jsonl"
_BAD = "bad.jsonl"
_SUMMARY = "summary.json"
_SHARDS = "shards"


@dataclass
class Counts:
    """Counts of the rows, documents and tokens of a preparation.

    Attributes:
        empty: Rows of white space only, which are skipped.
        skipped: Number of bad rows by reason.
        num_bytes: Bytes of text of the written documents.
        tokens: Number of written tokens; 0 for text.
    """

    rows: int = 0
    documents: int = 0
    empty: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """Counts as JSON values for the summary."""
        return {
            "rows": self.rows,
            "documents": self.documents,
            "empty": self.empty,
            "skipped": dict(sorted(self.skipped.items())),
            "bytes": self.num_bytes,
            "tokens": self.tokens or None,
        }


@dataclass(frozen=True)
class Position:
    """Position in the sources after the last written row.

    Args:
        source: Index of the row's file.
        offset: Offset of the row's end in the uncompressed file.
    """

    source: int = 0
    row: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Outputs:
    """Paths of all files and folders that a corpus preparation writes.

    Args:
        out: The corpus file, or the folder of shards.
    """

    out: Path

    @property
    def work(self) -> Path:
        """Folder of the unfinished preparation."""
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def bad(self) -> Path:
        """File with the skipped bad rows."""
        return self.out.with_suffix(".bad.jsonl")

    @property
    def summary(self) -> Path:
        """File with the counts of rows, and the settings."""
        return self.out.with_suffix(".summary.json")

    def clear(self) -> None:
        """Delete the results and any unfinished preparation."""
        self.clear_work()
        if self.out.is_dir():
            shutil.rmtree(self.out)
        for path in (self.out, self.bad, self.summary):
            path.unlink(missing_ok=True)

    def clear_work(self) -> None:
        """Delete any unfinished preparation."""
        if self.work.exists():
            shutil.rmtree(self.work)


def shard_name(number: int) -> str:
    """File name of the shard with a given number."""
    return f"{number:05}.arrow"


class PreparationWork:
    """Files of an unfinished corpus preparation, open for writing.

    Args:
        identity: Values that must be equal for a preparation to continue.
        schema: Returns the Arrow schema of a shard.
        shard_bytes: Size at which a shard ends; 0 for one file.
    """

    def __init__(
        self, outputs: Outputs, identity: Mapping[str, str], schema: Callable[[int], pa.Schema], shard_bytes: int = 0
    ) -> None:
        self._outputs = outputs
        self._schema, self._shard_bytes = schema, shard_bytes
        self.counts, self.position = Counts(), Position()
        self._blocks: list[Block] = []
        self._metadata: list[int] = []  # checksums of the metadata of the batches that an earlier start has written
        self._rest = 0  # checksum of that shard's bytes after its last whole block
        self._shard, self._size = 0, 0
        self._num_bad_bytes = 0
        self._sealing = Sealing()
        self._files = ExitStack()
        self._file = self._bad = self._checksums = cast("BinaryIO", None)  # until `open`
        folder = outputs.work
        (folder / _SHARDS).mkdir(parents=True, exist_ok=True)
        self._lock = (folder / _JOURNAL).open("ab")
        try:
            with suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    what = f"another process prepares into {folder}"
                    raise DataError(f"{what}; wait for it, or choose another --out") from None
            lines = read(folder / _JOURNAL)
            if lines:
                written = lines[0].get("identity")
                if not isinstance(written, dict):
                    written = {}
                if written != identity:
                    refuse(f"{outputs.work} holds the beginning of {outputs.out}", written, identity)
            else:
                append(folder / _JOURNAL, json.dumps({"identity": dict(identity)}))
            self._restore(lines[1:])
        except BaseException:
            self._lock.close()
            raise

    @property
    def is_complete(self) -> bool:
        """True if all content is written, and the files only need their final names."""
        return (self._outputs.work / _SUMMARY).exists()

    @property
    def is_empty(self) -> bool:
        """True if no batch has been written."""
        return self.position == Position()

    def open(self) -> None:
        """Truncate the files after the last complete batch, and open them for writing."""
        self._bad = self._files.enter_context(_cut(self._outputs.work / _BAD, self._num_bad_bytes))
        self._file = self._open_shard()

    def add_bad(self, line: Mapping[str, Any]) -> None:
        """Record skipped bad rows."""
        self._bad.write(f"{json.dumps(line)}\n".encode())

    def add_batch(self, arrays: Sequence[pa.Array], position: Position) -> None:
        """Write documents as one record batch, and record the source position after them."""
        content, block = ipc.message(pa.record_batch(arrays, schema=self._schema(self._shard)), self._size)
        if self._shard_bytes and self._blocks and self._size + content.size > self._shard_bytes:
            self._end_shard()
            self._shard += 1
            self._blocks, self._size = [], 0
            self._file = self._open_shard()
            content, block = ipc.message(pa.record_batch(arrays, schema=self._schema(self._shard)), self._size)
        self._file.write(content)
        entries, metadata = self._sealing.add_batch(memoryview(content), block.metadata)
        self._checksums.write(entries)
        for file in (self._file, self._checksums, self._bad):
            file.flush()
            os.fdatasync(file.fileno())
        self._size += content.size
        self._blocks.append(block)
        self.position = position
        line = {
            "position": asdict(position),
            "shard": self._shard,
            "block": block,
            "metadata": metadata,
            "rest": self._sealing.rest,
            "bad_bytes": self._bad.tell(),
            "counts": vars(self.counts),
        }
        append(self._outputs.work / _JOURNAL, json.dumps(line))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Complete the last shard, write the summary, and rename all results to their final names."""
        folder = self._outputs.work
        self._end_shard()
        self._bad.flush()
        os.fsync(self._bad.fileno())
        content = {**summary, "shards": self._shard + 1}
        replace_text(folder / _SUMMARY, f"{json.dumps(content, indent=2)}\n", durable=True)
        self.publish()

    def publish(self) -> None:
        """Rename the results to their final names, the corpus last; a repeated call completes an interrupted call."""
        folder, outputs = self._outputs.work, self._outputs
        bad = folder / _BAD
        if bad.exists() and bad.stat().st_size:
            bad.replace(outputs.bad)
        replace_bytes(outputs.summary, read_bytes(folder / _SUMMARY), durable=True)
        shards = folder / _SHARDS
        if shards.exists():
            sync_folder(shards)
            written = shards
            if not self._shard_bytes:
                written = shards / shard_name(0)
            written.replace(outputs.out)
        sync_folder(outputs.out.parent)
        shutil.rmtree(folder)

    def close(self) -> None:
        """Close the files."""
        with self._lock:  # another process may continue, even if the last bytes do not fit on the disk
            self._files.close()

    def _restore(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        last = lines[-1]
        self._shard = int(last["shard"])
        self._blocks = [Block(*line["block"]) for line in lines if line["shard"] == self._shard]
        self._metadata = [int(line["metadata"]) for line in lines if line["shard"] == self._shard]
        self._rest = int(last["rest"])
        self._size = sum(self._blocks[-1])
        self.position = Position(**last["position"])
        self.counts = replace(Counts(**last["counts"]), skipped=Counter(last["counts"]["skipped"]))
        self._num_bad_bytes = int(last["bad_bytes"])

    def _open_shard(self) -> BinaryIO:
        """Open the current shard after its last complete batch, and delete later shards of a killed process."""
        folder = self._outputs.work / _SHARDS
        for path in folder.iterdir():
            if path.name > shard_name(self._shard):
                path.unlink()
        path, num_blocks = folder / shard_name(self._shard), self._size // BLOCK_BYTES
        file = self._files.enter_context(_cut(path, self._size))
        self._checksums = self._files.enter_context(_cut(self._checksums_file, num_blocks * ENTRY_BYTES))
        if not self._size:
            begin = ipc.begin(self._schema(self._shard))
            self._size = file.write(begin)
            self._sealing = Sealing()
            self._checksums.write(self._sealing.add(memoryview(begin)))
            return file
        with path.open("rb") as written:
            written.seek(num_blocks * BLOCK_BYTES)
            self._sealing = Sealing(written.read(), self._metadata)
        if self._sealing.rest != self._rest:
            raise DataError(f"{path} is damaged: its end is not what was written; begin again with --restart")
        return file

    @property
    def _checksums_file(self) -> Path:
        """File with the checksums of the current shard's complete blocks."""
        return (self._outputs.work / shard_name(self._shard)).with_suffix(".xxh3")

    def _end_shard(self) -> None:
        """Write the checksums and the footer of the current shard."""
        self._file.write(ipc.END_OF_STREAM)
        self._checksums.write(self._sealing.add(memoryview(ipc.END_OF_STREAM)))
        self._checksums.close()
        with self._checksums_file.open("rb") as entries:
            shutil.copyfileobj(entries, self._file)
        footer = ipc.end(self._schema(self._shard), self._blocks)
        self._file.write(self._sealing.finish(self._size + len(ipc.END_OF_STREAM), footer))
        self._file.write(footer)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def recorded_origin(outputs: Outputs) -> list[str]:
    """Addresses of the Hub with their commits, as recorded by a finished or unfinished preparation."""
    begun: dict[str, Any] = {}
    with suppress(OSError):
        for line in read(outputs.work / _JOURNAL)[:1]:
            begun = line.get("identity") or {}
    text = read_summary(outputs.summary).get("origin") or begun.get("origin") or "[]"
    return [str(address) for address in json.loads(text)]


def _cut(path: Path, size: int) -> BinaryIO:
    """Truncate a file to a number of bytes, and open it for appending."""
    file = path.open("ab")
    present = os.fstat(file.fileno()).st_size
    if present < size:
        file.close()
        raise DataError(f"{path} has {present:,} bytes of {size:,} that were written; begin again with --restart")
    file.truncate(size)
    file.seek(size)  # the position was that of the old end
    return file


def refuse(what: str, written: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise a DataError if existing results are of other sources or settings."""
    names = {
        "sources": "the source files",
        "versions": "the times of the source files",
        "origin": "the commits of the Hub",
        "settings": "the settings",
        "checksums": "the checksums of the two releases of nxtrain",
    }
    lines = []
    for key, name in names.items():
        if key not in wanted or written.get(key) == wanted[key]:
            continue
        if key == "settings" and written.get(key):
            old, new = parse(written[key]) or {}, parse(wanted[key]) or {}
            for setting in {**new, **old}:
                there, here = old.get(setting, ""), new.get(setting, "")
                if there != here:
                    lines.append(f"{setting}: {there!r} there, {here!r} here")
        else:
            lines.append(f"{name} differ")
    listed = "".join(f"\n    {line}" for line in lines)
    raise DataError(f"{what} from other input; choose another --out, or begin again with --restart{listed}")


def read_summary(path: Location) -> dict[str, Any]:
    """Read the summary of a finished preparation; empty if there is none."""
    try:
        return parse(content_of(path)) or {}
    except OSError:
        return {}
