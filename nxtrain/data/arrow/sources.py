"""Source files of a corpus: the formats, recognised by content and name, and the fingerprint of all files."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from nxtrain.data.arrow.ipc import MAGIC
from nxtrain.data.files import unreadable
from nxtrain.data.walk import walk
from nxtrain.errors import ConfigError, DataError
from nxtrain.io.regular import open_regular, read_bytes

Kind = Literal["text", "jsonl", "parquet", "arrow", "arrow stream"]

FORMATS = (
    "text in UTF-8, JSON Lines (both plain, .gz or .zst), Parquet, Arrow (IPC file or stream), "
    "a folder of Hugging Face's save_to_disk, or a folder of such files"
)

_LOOK_BYTES = 1 << 16
"""Bytes at the begin of a file by which its format is recognised."""

_SAMPLE_BYTES = 1 << 14
"""Bytes at the begin, in the middle and at the end that a fingerprint covers."""

_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_COMPRESSED_NAMES = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_NAMES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".txt": "text",
    ".text": "text",
}
_OF_DATASETS = frozenset({"state.json", "dataset_info.json"})
"""Files of save_to_disk that hold no rows."""

_WORDS: dict[Kind, str] = {
    "text": "text",
    "jsonl": "JSON Lines",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "arrow stream": "Arrow stream",
}


@dataclass(frozen=True)
class Source:
    """A file of a corpus.

    Args:
        path: The file.
        name: Name that does not depend on the folder of the corpus, for the fingerprint.
        kind: Format.
        compression: Codec of pyarrow; empty for a plain file.
        size: Bytes on the disk.
        version: Time of the last change, in nanoseconds.
        sample: Hash of parts of the content.
    """

    path: Path
    name: str
    kind: Kind
    compression: str
    size: int
    version: int
    sample: str


def find_sources(arguments: Sequence[Path], only: str = "") -> list[Source]:
    """Find and recognise the files of a corpus, in the order of the arguments, those of a folder sorted by path.

    Args:
        arguments: Files and folders. Hidden files of a folder are not read.
        only: Pattern, such as `*.parquet`, that the names of a folder's files must match; empty: all.

    Raises:
        ConfigError: An argument does not exist, or a folder holds no file.
        DataError: A file of an unknown format, a folder with text beside other formats, or a file that cannot be read.
    """
    sources: list[Source] = []
    for argument in arguments:
        if not os.path.lexists(argument):
            raise ConfigError(f"{argument} does not exist; give {FORMATS}")
        found = [_recognise(path, name) for path, name in _files(argument, only)]
        if argument.is_dir():
            _refuse_mixture(argument, found)
        sources += found
    return sources


def fingerprint(sources: Sequence[Source]) -> str:
    """Identity of the files: names, sizes and parts of the content."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        digest.update(repr((source.name, source.size, source.kind, source.compression, source.sample)).encode())
    return digest.hexdigest()


def versions(sources: Sequence[Source]) -> str:
    """Identity of the files on this machine: the times of their last changes."""
    return hashlib.blake2b(repr([source.version for source in sources]).encode(), digest_size=16).hexdigest()


def summary(sources: Sequence[Source]) -> str:
    """Number of files of each format, in words."""
    kinds = Counter(f"{_WORDS[s.kind]}{f' ({s.compression})' if s.compression else ''}" for s in sources)
    return ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items()))


def _files(argument: Path, only: str) -> Iterator[tuple[Path, str]]:
    """Files of an argument, each with its name in it."""
    if not argument.is_dir():
        yield argument, argument.name
        return
    found = walk(argument)
    found.refuse_failed(f"{argument}")
    names = {path.name for path in found.files if path.parent == argument}
    if "dataset_dict.json" in names:
        splits = sorted({f"{path.parent}" for path in found.files if path.name == "state.json"})
        raise DataError(f"{argument} is a dataset of several splits; give one of them: {', '.join(splits)}")
    of_datasets = {path.parent for path in found.files if path.name == "state.json" and _is_dataset(path)}
    files = [path for path in found.files if not (path.parent in of_datasets and path.name in _OF_DATASETS)]
    chosen = [path for path in files if not only or fnmatch.fnmatch(path.name, only)]
    if not chosen:
        what = f"no file that matches {only}" if only else "no file"
        raise ConfigError(f"{argument} holds {what}; give {FORMATS}")
    yield from ((path, path.relative_to(argument).as_posix()) for path in chosen)


def _is_dataset(state: Path) -> bool:
    """True for the state of a folder of save_to_disk.

    Raises:
        DataError: The dataset selects rows by indices, which its files do not show.
    """
    try:
        content = json.loads(read_bytes(state))
    except (OSError, RecursionError, ValueError):
        return False
    if not isinstance(content, dict) or "_data_files" not in content:
        return False
    if content.get("_indices_data_files"):
        raise DataError(f"{state.parent} selects rows by indices; save it again after dataset.flatten_indices()")
    return True


def _refuse_mixture(folder: Path, found: Sequence[Source]) -> None:
    """Refuse text beside tables and JSON lines, which is mostly a README and no document."""
    texts = [source for source in found if source.kind == "text"]
    if texts and len(texts) < len(found):
        other = next(source for source in found if source.kind != "text")
        raise DataError(
            f"{folder} holds {summary(found)}: {texts[0].name} would be a document beside the rows of {other.name}; "
            f"choose files with --only, for example --only '*{Path(other.name).suffix}', or give them by name"
        )


def _recognise(path: Path, name: str) -> Source:
    """Read a file's begin and sample.

    Raises:
        DataError: The format is unknown, or the file cannot be read.
        StorageError: The storage fails.
    """
    try:
        with open(open_regular(path), "rb") as file:
            found = os.fstat(file.fileno())
            head = file.read(_LOOK_BYTES)
            digest = hashlib.blake2b(head[:_SAMPLE_BYTES], digest_size=16)
            for place in (found.st_size // 2, found.st_size - _SAMPLE_BYTES):
                if place >= _LOOK_BYTES:
                    file.seek(place)
                    digest.update(file.read(_SAMPLE_BYTES))
                elif place >= 0:
                    digest.update(head[place : place + _SAMPLE_BYTES])
    except OSError as error:
        raise unreadable(f"{path}", error) from error
    compression = next((codec for magic, codec in _COMPRESSIONS.items() if head.startswith(magic)), "")
    compression = compression or _COMPRESSED_NAMES.get(path.suffix.lower(), "")
    suffix = path.with_suffix("").suffix if path.suffix.lower() in _COMPRESSED_NAMES else path.suffix
    kind = _kind(path, suffix.lower(), _uncompressed(path, compression) if compression else head)
    if compression and kind not in {"text", "jsonl"}:
        raise DataError(
            f"{path} is {_WORDS[kind]} inside {compression}; uncompress it, since it has compression inside"
        )
    return Source(path, name, kind, compression, found.st_size, found.st_mtime_ns, digest.hexdigest())


def _uncompressed(path: Path, compression: str) -> bytes:
    """First bytes of a compressed file; empty if it is damaged, which reading reports."""
    try:
        with pa.OSFile(str(path)) as file, pa.CompressedInputStream(file, compression) as stream:
            return bytes(stream.read(_LOOK_BYTES))
    except (OSError, pa.ArrowException):
        return b""


def _kind(path: Path, suffix: str, head: bytes) -> Kind:
    """Format of a file by its first bytes, and by its suffix where these fit several."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(MAGIC):
        return "arrow"
    if head.startswith(b"\xff\xff\xff\xff"):
        return "arrow stream"
    known = _NAMES.get(suffix)
    if known in {"parquet", "arrow", "jsonl"}:  # an empty or damaged one is reported when it is read
        assert known is not None
        return known
    if _looks_like_json_lines(head):
        return "jsonl"
    if known == "text":
        return "text"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if suffix == ".json" and text[:1] in {b"[", b"{"}:
        raise DataError(f"{path} is one JSON document and no JSON Lines; convert it with: jq -c '.[]'")
    if b"\0" in head or not _is_utf8(head):
        raise DataError(f"{path} has an unknown format; give {FORMATS}")
    return "text"


def _is_utf8(head: bytes) -> bool:
    """True if the first bytes of a file are UTF-8; its last character may be cut."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and len(head) == _LOOK_BYTES
    return True


def _looks_like_json_lines(head: bytes) -> bool:
    """True if the first line is a JSON object, or is longer than the bytes and begins as one."""
    line, newline, _ = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if not line.startswith(b"{"):
        return False
    if not newline and len(head) >= _LOOK_BYTES:
        return line[1:].lstrip()[:1] == b'"'
    try:
        return isinstance(json.loads(line), dict)
    except (RecursionError, ValueError):
        return False
