"""Errors that nxtrain reports to people, each with the exit code that scripts and schedulers rely on.

A user's mistake ends in one readable message and an exit code, never in a traceback. Any exception outside this tree
is a bug of nxtrain and keeps its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
_OTHER_KINDS = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
_ABSENT = {errno.ENOENT, errno.EINVAL}
_OWN_PACKAGES = {"nxtrain", "nxtrain_models"}


class NxtrainError(Exception):
    """Base of all errors meant for people; the message names the problem, the values, the rule and the way out."""

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration.

    Args:
        key: Dotted key, such as `parallel.tp`; empty when no single key is at fault.
        reason: The problem, with the values and the rule.
        origin: Origin of the value (file, override, default); empty if unknown.
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
    """Configuration or input that cannot run; the error has every problem, not only the first."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[Problem]) -> None:
        self.problems = (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InputError(NxtrainError):
    """Unusable path or file that a command was given. Unlike a ConfigError, one rank alone may meet the error."""

    exit_code = 2


class DataError(NxtrainError):
    """Training or evaluation data that is missing, malformed or out of range."""

    exit_code = 3


class CheckpointError(NxtrainError):
    """A checkpoint that cannot be written, read or matched to the model."""

    exit_code = 4


class DamagedError(CheckpointError):
    """A file of a checkpoint whose content differs from the written bytes.

    Args:
        unread: The storage failed at every try to read the file, so that its content is unknown.
    """

    def __init__(self, file: Path | str, reason: str, unread: bool = False) -> None:
        self.file = file
        self.reason = reason
        self.unread = unread
        super().__init__(f"{file} is damaged: {reason}")

    def __reduce__(self) -> tuple[type[DamagedError], tuple[Path | str, str, bool]]:
        """Pickled form, for sending the error to other ranks."""
        return DamagedError, (self.file, self.reason, self.unread)


class StorageError(NxtrainError):
    """Storage that fails, perhaps only for a while: the next start may succeed."""

    exit_code = 4


class BackendError(NxtrainError):
    """A device, driver, library or process group that is absent or does not fit."""

    exit_code = 5


class CrashLoopError(NxtrainError):
    """A run that has failed at the same step again and again; another start would waste machine time."""

    exit_code = 5


class DivergedError(NxtrainError):
    """A loss or a gradient that is not finite, or a run whose training diverged."""

    exit_code = 6


class LostPeerError(NxtrainError):
    """Early end of another rank that this rank needs, so that this rank ends too.

    The lost rank reports the cause. A new start may succeed.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(message)


class HangError(NxtrainError):
    """A rank that stopped making progress."""

    exit_code = 7

    def __init__(self, message: str, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(message)


class WorkerError(NxtrainError):
    """Processes of a rank that die or hang more often than allowed; a new start may succeed."""


class RestartError(NxtrainError):
    """A run whose state in memory cannot be trusted; a new start from its newest checkpoint repairs it."""


class StoppedBySignal(NxtrainError):
    """A run that a signal ended after its state was saved; a new start resumes it."""

    exit_code = 75


def explained(error: Exception) -> NxtrainError | None:
    """Translate an exception of the system or of another package into an error of nxtrain; None for a defect."""
    if isinstance(error, NxtrainError):
        return error
    if isinstance(error, ImportError):
        name = (error.name or "").partition(".")[0]
        if name in _OWN_PACKAGES:
            return None
        what = f"{name} cannot be imported" if name else "a library cannot be loaded"
        return BackendError(f"{what}: {error}; install what nxtrain needs: pip install {_requirement(name)}")
    if isinstance(error, UnicodeError):
        return ConfigError(f"a text is not UTF-8: {error}; give or save it as UTF-8")
    return refused(error) if isinstance(error, OSError) else None


def _requirement(name: str) -> str:
    """Argument of pip that installs a package in a suitable version."""
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


def refused(error: OSError, what: str = "") -> NxtrainError:
    """Error for a failed system call, the same in every command; the message begins with `what` or the call's paths.

    Wrong paths and rights fail at every start. Storage may be back at the next start.
    """
    text = f"{what}: {error.strerror or error}" if what else cause_of(error)
    if error.errno in _ACCESS:
        return BackendError(f"{text}; check the rights of the path and the mount, or give another path")
    if error.errno in _OTHER_KINDS:
        return InputError(f"{text}; check the path, or give another one")
    if error.errno in _ABSENT:
        return BackendError(f"{text}; check the path, or give another one")
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return StorageError(f"{text}; free space, or give another path")
    return StorageError(f"{text}; start again when the storage or the network is back")


def cause_of(error: Exception) -> str:
    """Reason of a failed system call with its paths, or of an unreadable text, without Python's own words."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, ValueError) and "set_int_max_str_digits" in str(error):
        return "a number has too many digits"
    if not isinstance(error, OSError):
        return str(error)
    names = [f"{name}" for name in (error.filename, error.filename2) if name is not None]
    return f"{' -> '.join(names) or 'the system'}: {error.strerror or error}"
