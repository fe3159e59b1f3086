"""Prepared files, written atomically, and token arrays that need not fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError, NxtrainError, StorageError, refused
from nxtrain.common.io import atomic
from nxtrain.common.io.regular import NotRegularError, require_regular

Tokens = NDArray[np.integer[Any]]


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: the file gets its name once it is complete and on disk.

    Raises:
        BackendError: The rights are missing, or the disk is read-only.
        InputError: A file is in the way of the folder.
        StorageError: The disk is full or fails.
    """
    with refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path, durable=True, shared=True) as draft, draft.open("wb") as file:
            yield file


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn a failed write into an error for people, with the errors of `replacing`."""
    try:
        yield
    except OSError as error:
        raise refused(error, f"{path} cannot be written") from error


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


def unreadable(what: str, error: OSError) -> NxtrainError:
    """Make the error for a failed read: DataError for a wrong name or missing rights, StorageError for the storage."""
    mistakes = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | NotRegularError
    if isinstance(error, mistakes):
        return DataError(f"{what} cannot be read: {error.strerror}")
    return StorageError(f"{what} cannot be read: {error.strerror}. Start again when the storage is back")
