"""Errors that nxtrain reports to users, each with an exit code on which scripts and schedulers rely.

A user's mistake ends in one readable message and an exit code, without a traceback. Any exception outside this class
hierarchy is a bug of nxtrain, and keeps its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
_OTHER_KINDS = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Numbers of system errors of a full disk, an exhausted quota, and a file above the limit of the process."""
_ABSENT = {errno.ENOENT, errno.EINVAL}
_OWN_PACKAGES = {"nxtrain", "nxtrain_models"}


class NxtrainError(Exception):
    """Base class of all errors for users. The message names the problem, the values, the rule and the solution."""

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration, such as a value that breaks a rule.

    Args:
        key: Dotted key, such as `parallel.tp`; empty if the problem has no single key.
        reason: Description of the problem, with the values and the rule.
        origin: Origin of the value (file, override, default); empty if unknown.
        hint: Suggested solution, such as the nearest known name; may be empty.
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
    """Invalid configuration or input. The error lists all problems, not only the first."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[Problem]) -> None:
        self.problems = (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InputError(NxtrainError):
    """Unusable path or file given to a command. In contrast to a ConfigError, the error may occur on one rank only."""

    exit_code = 2


class DataError(NxtrainError):
    """Training or evaluation data that is missing, malformed or out of range."""

    exit_code = 3


class CheckpointError(NxtrainError):
    """A checkpoint that cannot be written, read or matched to the model."""

    exit_code = 4


class DamagedError(CheckpointError):
    """A checkpoint file whose content differs from the bytes that were written.

    Args:
        file: Path or address of the file.
        reason: Description of the damage.
        unread: Every attempt to read the file failed, so that its content is unknown.
    """

    def __init__(self, file: Path | str, reason: str, unread: bool = False) -> None:
        self.file = file
        self.reason = reason
        self.unread = unread
        super().__init__(f"{file} is damaged: {reason}")

    def __reduce__(self) -> tuple[type[DamagedError], tuple[Path | str, str, bool]]:
        """Pickle support, for sending the error to other ranks."""
        return DamagedError, (self.file, self.reason, self.unread)


class StorageError(NxtrainError):
    """Failure of storage that may be temporary, so that the next start may succeed."""

    exit_code = 4


class BackendError(NxtrainError):
    """A device, driver, library or process group that is missing or incompatible."""

    exit_code = 5


class CrashLoopError(NxtrainError):
    """A run that has failed repeatedly at the same step, so that a restart would waste machine time."""

    exit_code = 5


class DivergedError(NxtrainError):
    """A loss or gradient that is not finite, or a diverged training run."""

    exit_code = 6


class LostPeerError(NxtrainError):
    """Unexpected end of another rank that this rank communicates with, so that this rank must end too.

    The lost rank reports the cause. A restart may succeed.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(message)


class HangError(NxtrainError):
    """A rank that makes no progress."""

    exit_code = 7

    def __init__(self, message: str, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(message)


class WorkerError(NxtrainError):
    """Data loader processes of a rank that die or hang more often than allowed. A restart may succeed."""


class RestartError(NxtrainError):
    """A run whose state in memory cannot be trusted. A restart from the newest checkpoint repairs the run."""


class StoppedBySignal(NxtrainError):
    """End of a run by a signal, after its state was saved. A restart resumes the run."""

    exit_code = 75


def explained(error: Exception) -> NxtrainError | None:
    """Translate an exception of the system or of another package into an `NxtrainError`; None for a bug of nxtrain."""
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
    """Requirement of a package for `pip install`, with its version constraint."""
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


def more_room(number: int | None) -> str:
    """Way to make room for a file, after a system error of `FULL`."""
    if number == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f)"
    return "free space"


def refused(error: OSError, what: str = "") -> NxtrainError:
    """Translate a failed system call into an `NxtrainError`; the message begins with `what` or the call's paths.

    Wrong paths and missing permissions fail at every start. Storage may work again at the next start.
    """
    text = f"{what}: {error.strerror or error}" if what else cause_of(error)
    if error.errno in _ACCESS:
        return BackendError(f"{text}; check the permissions of the path and the mount, or give another path")
    if error.errno in _OTHER_KINDS:
        return InputError(f"{text}; check the path, or give another one")
    if error.errno in _ABSENT:
        return BackendError(f"{text}; check the path, or give another one")
    if error.errno in FULL:
        return StorageError(f"{text}; {more_room(error.errno)}, or give another path")
    return StorageError(f"{text}; start again when the storage or the network is back")


def cause_of(error: Exception) -> str:
    """Short reason of an error for messages. For a failed system call, its paths and the system's error text."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, ValueError) and "set_int_max_str_digits" in str(error):
        return "a number has too many digits"
    if not isinstance(error, OSError):
        return str(error)
    names = [f"{name}" for name in (error.filename, error.filename2) if name is not None]
    return f"{' -> '.join(names) or 'the system'}: {error.strerror or error}"
