"""Text corpora: the Python standard library, which every machine has, or a user's own files.

A corpus is read from the disk in each pass and never held whole in memory.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nxtrain.common.errors import DataError, cause_of
from nxtrain.common.io.regular import open_regular, read_bytes
from nxtrain.data.files import unreadable
from nxtrain.data.walk import matches, walk

# Tests of the library and tables of character codes are not prose.
_NOT_PROSE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})

_JSON_LINES = frozenset({".jsonl", ".ndjson"})

_LOOK_BYTES = 1 << 20
"""Bytes at the begin of a file that are searched for its first two lines."""


@dataclass
class Corpus:
    """Documents in a fixed order; iteration yields the text of each document that is not blank.

    A file is one document; of a `.jsonl` file each line is one (its "text" field). A file with a NUL byte is binary
    (git's rule) and skipped, because folders of text hold pictures too.

    Attributes:
        name: Name of the corpus in messages.
        files: The files, in document order.
        undecodable: Treatment of text that is not UTF-8: `skip` the file, or `refuse` the corpus.
        skipped: Every file that a pass has skipped, with the reason.
        reading: The file that the newest pass reads.
    """

    name: str
    files: tuple[Path, ...]
    undecodable: Literal["skip", "refuse"]
    skipped: dict[Path, str] = field(default_factory=dict, compare=False)
    reading: Path | None = field(default=None, compare=False)

    def __iter__(self) -> Iterator[str]:
        """Read every document once.

        Raises:
            DataError: A file that cannot be read or decoded, or a `.jsonl` line without text; names file and line.
            StorageError: The storage fails.
        """
        for path in self.files:
            self.reading = path
            try:
                documents = self._whole(path)
                if path.suffix.lower() in _JSON_LINES:
                    documents = _json_lines(path)
                yield from (document for document in documents if document.strip())
            except OSError as error:
                raise unreadable(f"{path}", error) from error

    def _whole(self, path: Path) -> Iterator[str]:
        content = read_bytes(path)
        if b"\0" in content:
            self.skipped[path] = "binary: it holds a NUL byte"
            return
        if _looks_like_json_lines(content):
            raise DataError(
                f'{path}: each line is a JSON object with "text", which would be read as plain text; call it '
                f'{path.stem}.jsonl, and the "text" of each line becomes a document'
            )
        try:
            yield _decode(content, path)
        except DataError as error:
            if self.undecodable == "refuse":
                raise
            self.skipped[path] = str(error)


def stdlib_corpus(limit_bytes: int = 16_000_000) -> Corpus:
    """Corpus of the running Python's standard library: the source with its docstrings, one module per document.

    Docstrings are not repeated as documents of their own: training could then see the text of a held-out document.
    Files are ordered by a hash of their names, so that the limit takes a sample of the whole library.

    Args:
        limit_bytes: Files are taken until their sizes pass this; all of CPython 3.11 is 10.7 MB.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = list(_modules(root))
    modules.sort(key=lambda module: (zlib.crc32(module.as_posix().encode()), module))
    files, num_bytes = [], 0
    for module in modules:
        num_bytes += (root / module).stat().st_size
        if num_bytes > limit_bytes:
            break
        files.append(root / module)
    return Corpus(f"the standard library in {root}", tuple(files), "skip")


def _modules(root: Path) -> Iterator[Path]:
    """Modules of the library, as paths relative to its folder; folders of installed packages are not entered."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_PROSE]
        yield from (Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))


def text_corpus(path: str) -> Corpus:
    """Corpus of a file, of all files below a folder except hidden ones, or of a glob such as `books/**/*.txt`.

    Raises:
        DataError: No file is found, or a folder or file cannot be read.
        StorageError: The storage fails.
    """
    root = Path(path).expanduser()
    walked = walk(root) if os.path.lexists(root) else matches(str(root))
    walked.refuse_failed(f"data.path={path}")
    files = tuple(walked.files)
    if not files:
        what = "does not exist"
        if root.is_dir():
            what = "holds no file"
        elif glob.has_magic(path):
            what = "matches no file"
        raise DataError(f"data.path={path} {what}; name a text file, a folder of them, or a glob (from {Path.cwd()})")
    return Corpus(path, files, "refuse", walked.skipped)


def _looks_like_json_lines(content: bytes) -> bool:
    lines = content[:_LOOK_BYTES].split(b"\n", 2)[:2]
    if len(lines) == 1 or not all(line.lstrip().startswith(b"{") and b'"text"' in line for line in lines):
        return False
    try:
        first = json.loads(lines[0])
    except (RecursionError, ValueError):
        return False
    return isinstance(first, dict) and isinstance(first.get("text"), str)


def _json_lines(path: Path) -> Iterator[str]:
    with open(open_regular(path), "rb") as file:
        start = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _json_text(_decode(line, path, number, start), f"{path}, line {number}")
            start += len(line)


def _json_text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where}: not JSON: {cause_of(error)}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: no string under "text"; each line is an object such as {{"text": "..."}}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f'{where}: "text" holds half of a surrogate pair at character {error.start}') from error
    return text


def _decode(content: bytes, path: Path, line: int = 0, offset: int = 0) -> str:
    """Decode UTF-8; `line` is the content's line in the file, 0 for a whole file, and `offset` its first byte."""
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = line or content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}, byte {offset + error.start}: 0x{content[error.start]:02x} is not UTF-8 "
            f"({error.reason}); convert the file, for example with iconv -t utf-8"
        ) from error
