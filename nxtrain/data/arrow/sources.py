"""Source files of a corpus: recognition of their formats by content and name, and a fingerprint of all files."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import pyarrow as pa

from nxtrain.common.errors import ConfigError, DataError
from nxtrain.common.io.jsonl import parse
from nxtrain.common.io.object_store import BucketStore, Location, content_of
from nxtrain.common.io.paths import listing
from nxtrain.data.arrow.hub_files import HubFiles
from nxtrain.data.arrow.ipc import MAGIC
from nxtrain.data.corpora import walk
from nxtrain.data.storage import open_file, open_stream, read_exactly, unreadable

Kind = Literal["text", "jsonl", "parquet", "arrow", "arrow stream"]

FORMATS = (
    "text in UTF-8, JSON Lines (both plain, .gz or .zst), Parquet, Arrow (IPC file or stream), "
    "a folder of Hugging Face's save_to_disk, or a folder of such files"
)

_LOOK_BYTES = 1 << 16
"""Bytes at the beginning of a file from which its format is recognised."""

_SAMPLE_BYTES = 1 << 14
"""Bytes at the beginning, in the middle and at the end of a file that its fingerprint covers."""

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
"""Files of Hugging Face's `save_to_disk` that contain no rows."""

_WORDS: dict[Kind, str] = {
    "text": "text",
    "jsonl": "JSON Lines",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "arrow stream": "Arrow stream",
}


@dataclass(frozen=True)
class Source:
    """A source file of a corpus.

    Args:
        name: Name relative to the folder of the corpus, for the fingerprint.
        compression: Name of pyarrow's codec; empty for an uncompressed file.
        version: Size and modification time of a file, or version tag of an object.
        sample: Hash of parts of the content.
    """

    path: Location
    name: str
    kind: Kind
    compression: str
    size: int
    version: object
    sample: str


def find_sources(
    arguments: Sequence[Location | HubFiles], only: str = "", mixed: bool = False, any_text: bool = False
) -> list[Source]:
    """Find the source files of a corpus and recognise their formats.

    Files are in the order of the arguments, and sorted by path inside of a folder.

    Args:
        arguments: Files and folders, objects and bucket prefixes, or files of the Hub. Hidden files are ignored.
        only: Pattern, such as `*.parquet`, that the names of a folder's files must match; empty for all.
        mixed: A folder may contain text files next to other formats.
        any_text: Treat a file of unknown format as text, whose reader skips or refuses other content.
    """
    sources: list[Source] = []
    for given in arguments:
        if isinstance(given, HubFiles):
            argument: Location = given.folder
            names: list[PurePosixPath] | None = [PurePosixPath(file) for file in given.files]
        else:
            argument, names = given, _listed(given)
        if names is None:
            sources.append(_recognise(argument, argument.name, any_text))
            continue
        of_folder = [_recognise(argument / name, name, any_text) for name in _chosen(argument, names, only)]
        texts = [source for source in of_folder if source.kind == "text"]
        # Text next to tables and JSON lines is mostly a README and not a document.
        if not mixed and texts and len(texts) < len(of_folder):
            other = next(source for source in of_folder if source.kind != "text")
            raise DataError(
                f"{argument} holds {summary(of_folder)}: {texts[0].name} would be a document next to the rows of "
                f"{other.name}; choose files with --only, for example --only '*{PurePosixPath(other.name).suffix}', "
                "give them by name, or take all of them with --mixed"
            )
        sources += of_folder
    return sources


def fingerprint(sources: Sequence[Source]) -> str:
    """Hash that identifies the source files: of their names, sizes and samples of their content."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        digest.update(repr((source.name, source.size, source.kind, source.compression, source.sample)).encode())
    return digest.hexdigest()


def versions(sources: Sequence[Source]) -> str:
    """Hash that identifies this copy of the files: of modification times, or of the version tags of objects."""
    return hashlib.blake2b(repr([source.version for source in sources]).encode(), digest_size=16).hexdigest()


def summary(sources: Sequence[Source]) -> str:
    """Number of files of each format, as text."""
    kinds: Counter[str] = Counter()
    for source in sources:
        kind = _WORDS[source.kind]
        if source.compression:
            kind += f" ({source.compression})"
        kinds[kind] += 1
    return ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items()))


def _listed(argument: Location) -> list[PurePosixPath] | None:
    """Sorted names of the files below a folder or a prefix; None for a single file or object."""
    if isinstance(argument, Path):
        if not os.path.lexists(argument):
            raise ConfigError(f"{argument} does not exist; give {FORMATS}")
        if not argument.is_dir():
            return None
        walked = walk(argument)
        walked.refuse_failed(f"{argument}")
        return [PurePosixPath(path.relative_to(argument).as_posix()) for path in walked.files]
    if argument.key and argument.is_file():
        return None
    # Objects whose names end with a slash stand for folders.
    keys = [key for key in BucketStore(argument).sizes() if key and not key.endswith("/")]
    if not keys:
        raise ConfigError(f"{argument} does not exist; check it with: {listing(argument)}")
    names = sorted(map(PurePosixPath, keys))
    return [name for name in names if "/." not in f"/{name}"]


def _chosen(argument: Location, names: Sequence[PurePosixPath], only: str) -> list[str]:
    """Names of the files of a folder that contain documents and match a pattern."""
    states = [name for name in names if name.name == "state.json"]
    if PurePosixPath("dataset_dict.json") in names:
        splits = sorted({f"{argument / str(state.parent)}" for state in states})
        raise DataError(f"{argument} is a dataset of several splits; give one of them: {', '.join(splits)}")
    of_datasets = {state.parent for state in states if _is_dataset(argument / str(state), argument)}
    files = [name for name in names if not (name.parent in of_datasets and name.name in _OF_DATASETS)]
    chosen = [str(name) for name in files if not only or fnmatch.fnmatch(name.name, only)]
    if not chosen:
        what = f"no file that matches {only}" if only else "no file"
        raise ConfigError(f"{argument} holds {what}; give {FORMATS}")
    return chosen


def _is_dataset(state: Location, folder: Location) -> bool:
    """True if a file is the state file in a folder of Hugging Face's `save_to_disk`."""
    content: dict[str, Any] | None = None
    with suppress(OSError):
        content = parse(content_of(state))
    if content is None or "_data_files" not in content:
        return False
    if content.get("_indices_data_files"):
        raise DataError(f"{folder} selects rows by indices; save it again after dataset.flatten_indices()")
    return True


def _recognise(path: Location, name: str, any_text: bool) -> Source:
    """Recognise the format of a file, and hash its sample."""
    file = open_file(path, None)
    try:
        head = bytes(read_exactly(file, _LOOK_BYTES, 0))
        digest = hashlib.blake2b(head[:_SAMPLE_BYTES], digest_size=16)
        for offset in (file.num_bytes // 2, file.num_bytes - _SAMPLE_BYTES):
            if offset >= _LOOK_BYTES:
                digest.update(read_exactly(file, _SAMPLE_BYTES, offset))
            elif offset >= 0:
                digest.update(head[offset : offset + _SAMPLE_BYTES])
    except OSError as error:
        raise unreadable(f"{path}", error) from error
    compression = next((codec for magic, codec in _COMPRESSIONS.items() if head.startswith(magic)), "")
    plain = PurePosixPath(name)
    by_name = _COMPRESSED_NAMES.get(plain.suffix.lower(), "")
    if by_name:
        plain = plain.with_suffix("")
        compression = compression or by_name
    if compression:
        try:
            with open_stream(path, _LOOK_BYTES) as raw:
                file_of_arrow = pa.PythonFile(raw, mode="r")
                with pa.CompressedInputStream(file_of_arrow, compression) as stream:
                    head = bytes(stream.read(_LOOK_BYTES))
        except (OSError, pa.ArrowException):  # a later read reports the damaged file
            head = b""
    kind = _kind(path, plain.suffix.lower(), head, any_text)
    if compression and kind not in {"text", "jsonl"}:
        raise DataError(
            f"{path} is {_WORDS[kind]} inside {compression}; uncompress it, since it is compressed internally"
        )
    return Source(path, name, kind, compression, file.num_bytes, file.version(), digest.hexdigest())


def _kind(path: Location, suffix: str, head: bytes, any_text: bool) -> Kind:
    """Format of a file by its first bytes, or by its name if the bytes fit several formats."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(MAGIC):
        return "arrow"
    if head.startswith(b"\xff\xff\xff\xff"):
        return "arrow stream"
    by_name = _NAMES.get(suffix)
    if by_name in {"parquet", "arrow", "jsonl"}:  # a later read reports an empty or damaged file
        assert by_name is not None
        return by_name
    if _looks_like_json_lines(head):
        return "jsonl"
    if by_name == "text" or any_text:
        return "text"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if suffix == ".json" and text[:1] in {b"[", b"{"}:
        raise DataError(f"{path} is one JSON document, not JSON Lines; convert it with: jq -c '.[]'")
    if b"\0" in head or not _is_utf8(head):
        raise DataError(f"{path} has an unknown format; give {FORMATS}")
    return "text"


def _is_utf8(head: bytes) -> bool:
    """True if the first bytes of a file are UTF-8; the last character may be incomplete."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and len(head) == _LOOK_BYTES
    return True


def _looks_like_json_lines(head: bytes) -> bool:
    """True if the first line is a JSON object, or the beginning of one that is longer than the bytes."""
    line, newline, _ = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if not line.startswith(b"{"):
        return False
    if not newline and len(head) >= _LOOK_BYTES:
        return line[1:].lstrip()[:1] == b'"'
    return parse(line) is not None
