"""Source files of a text corpus: the Python standard library, a folder, or files that match a glob pattern.

Every entry that is skipped or cannot be read is reported.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nxtrain.common.errors import DataError, NxtrainError, StorageError
from nxtrain.common.io.regular import NotRegularError, kind_of, read_bytes
from nxtrain.common.text import indented
from nxtrain.data.storage import unreadable

# Tests of the library and tables of character codes are not prose.
_NOT_PROSE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})


@dataclass
class WalkedFiles:
    """Files and other entries found while walking a folder.

    Attributes:
        files: Regular files and links to them, sorted.
        skipped: Links to folders, with the reason.
        failed: Unreadable entries, FIFOs, sockets and devices, with the error.
    """

    files: list[Path] = field(default_factory=list)
    skipped: dict[Path, str] = field(default_factory=dict)
    failed: list[tuple[Path, OSError]] = field(default_factory=list)

    def add(self, path: Path) -> bool:
        """Add an entry; return True if the entry is a folder to walk into."""
        try:
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                if path.is_symlink():
                    self.skipped[path] = "a link to a folder, which is not followed"
                return not path.is_symlink()
            kind = kind_of(mode)
            if kind:
                raise NotRegularError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
            self.files.append(path)
        except OSError as error:
            self.failed.append((path, error))
        return False

    def refuse_failed(self, what: str) -> None:
        """Raise an error if any entry cannot be read."""
        if not self.failed:
            return
        lines = [f"{path}: {error.strerror}" for path, error in self.failed]
        kind: type[NxtrainError] = DataError
        if any(isinstance(unreadable(what, error), StorageError) for _, error in self.failed):
            kind = StorageError
        raise kind(
            f"{what}: {len(self.failed):,} of its folders and files cannot be read, and training would miss their "
            f"text: make them readable, remove them, or name the rest by a glob{indented(lines)}"
        )


def walk(root: Path) -> WalkedFiles:
    """Walk a file, or all entries below a folder except hidden ones. Links to folders are not followed."""
    walked = WalkedFiles()
    waiting = []
    if root.is_dir() or walked.add(root):
        waiting.append(root)
    while waiting:
        folder = waiting.pop()
        try:
            names = [name for name in os.listdir(folder) if not name.startswith(".")]
        except OSError as error:
            walked.failed.append((folder, error))
            continue
        for name in sorted(names):
            path = folder / name
            if walked.add(path):
                waiting.append(path)
    walked.files.sort()
    return walked


def matches(pattern: str) -> WalkedFiles:
    """Find the files that match a glob, recursive at `**`. Unreadable folders on its path count as failed."""
    walked = WalkedFiles()
    parts = Path(pattern).parts
    for number, part in enumerate(parts):
        for folder in _folders(parts[:number], part):
            try:
                if glob.has_magic(part):
                    os.scandir(folder).close()
                else:
                    os.stat(folder / part)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                walked.failed.append((folder, error))
    for name in glob.glob(pattern, recursive=True):
        if not os.path.isdir(name):
            walked.add(Path(name))
    walked.files.sort()
    return walked


def _folders(above: tuple[str, ...], part: str) -> set[Path]:
    """Folders in which one part of a glob pattern is matched: the folders above, and for `**` all folders below."""
    start = Path(*above)
    if not above:
        names = ["."]
        if part == "**":
            names += glob.glob("**", recursive=True)
    elif part == "**":
        names = glob.glob(str(start / "**"), recursive=True)
    else:
        names = glob.glob(str(start), recursive=True)
    return {Path(name) for name in names if os.path.isdir(name)}


def stdlib_files(limit_bytes: int = 16_000_000) -> list[Path]:
    """Source files of the running Python's standard library, as a sample that depends on their names.

    Docstrings are not repeated as separate documents, since training could then contain the text of a held-out
    document. Files are ordered by a hash of their names, so that the limit takes a sample of the whole library.

    Args:
        limit_bytes: Maximum total size of the files; all of CPython 3.11 is 10.7 MB.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_PROSE]  # folders of installed packages are not entered
        modules += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    modules.sort(key=lambda module: (zlib.crc32(module.as_posix().encode()), module))
    files, num_bytes = [], 0
    for module in modules:
        num_bytes += (root / module).stat().st_size
        if num_bytes > limit_bytes:
            break
        files.append(root / module)
    return files


def stdlib_texts(limit_bytes: int = 16_000_000) -> Iterator[str]:
    """Texts of the standard library's modules that are not blank; bytes that are not UTF-8 are dropped."""
    for path in stdlib_files(limit_bytes):
        text = read_bytes(path).decode(errors="ignore")
        if text.strip():
            yield text


def text_files(path: str) -> WalkedFiles:
    """Files that `data.path` names: a file, all visible files below a folder, or a glob such as `books/**/*.txt`.

    Raises:
        DataError: No file is there, or a folder or file cannot be read.
        StorageError: The storage fails.
    """
    root = Path(path).expanduser()
    walked = walk(root) if os.path.lexists(root) else matches(str(root))
    walked.refuse_failed(f"data.path={path}")
    if not walked.files:
        what = "does not exist"
        if root.is_dir():
            what = "holds no file"
        elif glob.has_magic(path):
            what = "matches no file"
        raise DataError(f"data.path={path} {what}; name a text file, a folder of them, or a glob (from {Path.cwd()})")
    return walked
