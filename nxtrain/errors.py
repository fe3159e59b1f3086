"""Every failure that nxtrain reports to a person, each with the exit code that scripts and schedulers rely on.

A user's mistake ends in one readable message and its exit code, never in a traceback; anything outside this tree is a
bug of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
_NAMES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
_OWN_PACKAGES = {"nxtrain", "nxtrain_models"}


class NxtrainError(Exception):
    """Base of all errors meant for people; the message says what, the values, the rule and the way out."""

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    Args:
        key: Dotted key, such as `parallel.tp`; empty when no single key is at fault.
        reason: What is wrong, with the values and the rule.
        origin: Where the value came from (file, override, default); empty if unknown.
        hint: The way out, such as the nearest known name; may be empty.
    """

    key: str
    reason: str
    origin: str = ""
    hint: str = ""

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin else ""
        hint = f"\n    {self.hint}" if self.hint else ""
        return f"{self.key}{where}: {self.reason}{hint}" if self.key else f"{self.reason}{hint}"


class ConfigError(NxtrainError):
    """A configuration or an input that cannot run; carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[Problem]) -> None:
        self.problems = (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DataError(NxtrainError):
    """Training or evaluation data that is missing, malformed or out of range."""

    exit_code = 3


class CheckpointError(NxtrainError):
    """A checkpoint that cannot be written, read or matched to the model."""

    exit_code = 4


class DamagedError(CheckpointError):
    """A file of a checkpoint that is not what was written.

    Args:
        file: Which; a path, or an address.
        reason: What is wrong with it.
        unread: The storage does not give it, again and again; what it holds is unknown.
    """

    def __init__(self, file: Path | str, reason: str, unread: bool = False) -> None:
        self.file, self.reason, self.unread = file, reason, unread
        super().__init__(f"{file} is damaged: {reason}")

    def __reduce__(self) -> tuple[type[DamagedError], tuple[Path | str, str, bool]]:
        """How it travels to other ranks."""
        return DamagedError, (self.file, self.reason, self.unread)


class StorageError(NxtrainError):
    """Storage that does not answer as it should, and may do so at the next start."""

    exit_code = 4


class BackendError(NxtrainError):
    """A device, driver, library or process group that is absent or does not fit."""

    exit_code = 5


class CrashLoopError(NxtrainError):
    """A run that has failed at the same step again and again, so that another start would only cost."""

    exit_code = 5


class DivergedError(NxtrainError):
    """A loss or a gradient that is no longer finite, or a run that left its course."""

    exit_code = 6


class LostPeerError(NxtrainError):
    """A rank that this one needs ended early, and so does this one; why is told there, and a new start may mend it.

    Args:
        message: What is told here.
        peer: Who ended, if that is known.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(message)


class HangError(NxtrainError):
    """A rank that stopped making progress.

    Args:
        message: What is told.
        peer: The one that did not come, if that is known.
    """

    exit_code = 7

    def __init__(self, message: str, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(message)


class RestartError(NxtrainError):
    """A run whose state can no longer be trusted; a new start from its newest checkpoint mends it."""


class StoppedBySignal(NxtrainError):
    """A run that a signal ended after its state was saved; starting it again continues it."""

    exit_code = 75


def explained(error: Exception) -> NxtrainError | None:
    """Read an exception of the system or of another package as an error for people.

    Returns:
        The error, of the exit code that fits; None for a defect of nxtrain, which needs its traceback.
    """
    if isinstance(error, NxtrainError):
        return error
    if isinstance(error, ImportError):
        return _missing(error)
    if isinstance(error, UnicodeError):
        return ConfigError(f"a text is not UTF-8: {error}; give or save it as UTF-8")
    return _refused(error) if isinstance(error, OSError) else None


def _missing(error: ImportError) -> NxtrainError | None:
    """A package that is absent, of another version, or broken."""
    name = (error.name or "").partition(".")[0]
    if name in _OWN_PACKAGES:
        return None
    what = f"{name} cannot be imported" if name else "a library cannot be loaded"
    return BackendError(f"{what}: {error}; install what nxtrain needs: pip install {_requirement(name)}")


def _requirement(name: str) -> str:
    """The argument of pip that brings a package in a version that fits."""
    import re
    from importlib.metadata import PackageNotFoundError, requires

    try:
        declared = requires("nxtrain") or []
    except PackageNotFoundError:
        declared = []
    for requirement in declared:
        text, _, _ = requirement.partition(";")
        if re.split(r"[^\w-]", text, maxsplit=1)[0].replace("-", "_") == name:
            return f"'{text.strip()}'"
    return name or "nxtrain"


def _refused(error: OSError) -> NxtrainError:
    """Error of the system: names and rights fail at every start, while storage may be back at the next."""
    names = [f"{name}" for name in (error.filename, error.filename2) if name is not None]
    text = f"{' -> '.join(names) or 'the system'}: {error.strerror or error}"
    if error.errno in _ACCESS:
        return BackendError(f"{text}; check the rights of the path and the mount, or give another path")
    if error.errno in _NAMES:
        return BackendError(f"{text}; check the path, or give another one")
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(f"{text}; free space, or give another path")
    return StorageError(f"{text}; start again when the storage or the network is back")
