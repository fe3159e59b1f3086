"""Every failure that nxtrain reports to a person, each with the exit code that scripts and schedulers rely on.

A user's mistake ends in one readable message and its exit code, never in a traceback; anything outside this tree is a
bug of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
