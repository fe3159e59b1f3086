"""Prepared files, written atomically, and token arrays that need not fit in memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nxtrain.common.errors import DataError, NxtrainError, StorageError, refused
from nxtrain.common.io import atomic
from nxtrain.common.io.regular import NotRegularError, read_bytes, require_regular
from nxtrain.data.checksums import Checksums, Summing, checksums_of

Tokens = NDArray[np.integer[Any]]

MARKED = np.dtype(np.uint32)
"""Type of the ids in token files that a run writes; their marks are `PROMPT_BIT` and `END_BIT`."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: the file gets its name once it is complete and on disk.

    Raises:
        BackendError: The rights are missing, or the disk is read-only.
        InputError: A file is in the way of the folder.
        StorageError: The disk is full or fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path, durable=True, shared=True) as draft, draft.open("wb") as file:
            yield file
    except OSError as error:
        raise refused(error, f"{path} cannot be written") from error


@contextmanager
def writing_tokens(path: Path, dtype: DTypeLike) -> Iterator[Callable[[Tokens], None]]:
    """Write a 1-d .npy file piece by piece, and its checksums; yields the function that appends ids.

    Raises:
        NxtrainError: The file cannot be written; see `replacing`.
    """
    num_tokens, summing = 0, Summing()

    def append(ids: Tokens) -> None:
        nonlocal num_tokens
        num_tokens += ids.size
        content = np.ascontiguousarray(ids.astype(dtype, copy=False)).data
        summing.add(content)
        file.write(content)

    checksums_of(path).unlink(missing_ok=True)  # checksums of an earlier file of the name
    with replacing(path) as file:
        file.write(_header(dtype, 0))
        yield append
        # numpy pads its header for the largest possible count, so that the final header has the same length.
        header = _header(dtype, num_tokens)
        file.seek(0)
        file.write(header)
    with replacing(checksums_of(path)) as file:
        file.write(summing.finish(header).sealed())


def read_checksums(path: Path) -> Checksums:
    """Checksums of a token file that a run has prepared.

    Raises:
        DataError: The checksum file is missing, unreadable, or differs from the written bytes.
        StorageError: The storage fails.
    """
    file = checksums_of(path)
    try:
        return Checksums.of(read_bytes(file))
    except OSError as error:
        raise unreadable(f"{file}", error) from error
    except ValueError as error:
        raise DataError(f"{file} is damaged: {error}; delete it, and the next start prepares the data again") from error


def read_array(path: Path) -> NDArray[Any]:
    """Map a .npy file into memory.

    Raises:
        DataError: The file is missing, truncated, or not a .npy array.
        StorageError: The storage fails.
    """
    try:
        require_regular(path)
        with np.errstate(over="ignore"):  # numpy multiplies the lengths of a header before it checks them
            array = np.load(path, mmap_mode="r")
    except OSError as error:
        raise unreadable(f"{path}", error) from error
    except Exception as error:  # numpy reads headers with Python's parsers, and passes their errors on
        raise DataError(f"{path} is no .npy array of numbers, or is cut short: {error}") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is an archive of arrays; save the one that holds the ids with numpy.save")
    return array


def is_whole(path: Path) -> bool:
    """True if an earlier start wrote the file and its checksums, and both can be opened. Other files are written again.

    The content is verified when rows are read. Damage of the content is an error then, because a disk may cause it.
    """
    try:
        return path.exists() and read_array(path).nbytes == read_checksums(path).num_bytes > 0
    except DataError:
        return False


def unreadable(what: str, error: OSError) -> NxtrainError:
    """Make the error for a failed read: DataError for a wrong name or missing rights, StorageError for the storage."""
    mistakes = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | NotRegularError
    if isinstance(error, mistakes):
        return DataError(f"{what} cannot be read: {error.strerror}")
    return StorageError(f"{what} cannot be read: {error.strerror}. Start again when the storage is back")


def _header(dtype: DTypeLike, num_tokens: int) -> bytes:
    descr, file = np.lib.format.dtype_to_descr(np.dtype(dtype)), io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (num_tokens,)})
    return file.getvalue()
