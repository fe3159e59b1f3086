"""Files of which a run makes a corpus itself: the Python standard library, or a user's text."""

from __future__ import annotations

import glob
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from nxtrain.common.errors import DataError
from nxtrain.common.io.regular import read_bytes
from nxtrain.data.walk import WalkedFiles, matches, walk

# Tests of the library and tables of character codes are not prose.
_NOT_PROSE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})


def stdlib_files(limit_bytes: int = 16_000_000) -> list[Path]:
    """Modules of the running Python's standard library: the source with its docstrings.

    Docstrings are not repeated as documents of their own: training could then see the text of a held-out document.
    Files are ordered by a hash of their names, so that the limit takes a sample of the whole library.

    Args:
        limit_bytes: Files are taken until their sizes pass this; all of CPython 3.11 is 10.7 MB.
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
    """Texts of the modules that are UTF-8 and not blank."""
    for path in stdlib_files(limit_bytes):
        text = read_bytes(path).decode(errors="ignore")
        if text.strip():
            yield text


def text_files(path: str) -> WalkedFiles:
    """Files of `data.path`: a file, all files below a folder except hidden ones, or a glob such as `books/**/*.txt`.

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
