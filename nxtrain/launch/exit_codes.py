"""Exit codes of nxtrain's commands, by which agents and clusters decide about a restart.

Slurm's script, Kubernetes' policies and the table of docs/recovery.md are generated from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from nxtrain.common.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    HangError,
    NxtrainError,
    StoppedBySignal,
)

_SIGNALS = tuple(range(129, 193))
"""Exit codes of a shell for processes that were ended by signals 1 to 64."""


@dataclass(frozen=True)
class ExitCode:
    """Kind of result of a command, with its exit codes.

    Args:
        codes: Exit codes.
        text: Exit codes as text for the documentation.
        meaning: Meaning of the codes.
        restart: Advice about a restart.
        helps: True if a restart of the same command may succeed, for example on another machine.
    """

    codes: tuple[int, ...]
    text: str
    meaning: str
    restart: str
    helps: bool


EXIT_CODES = (
    ExitCode((0,), "0", "done", "no", helps=False),
    ExitCode(
        (ConfigError.exit_code, DataError.exit_code),
        "2, 3",
        "configuration or input; data",
        "after the mistake is corrected",
        helps=False,
    ),
    ExitCode(
        (CheckpointError.exit_code,),
        "4",
        "checkpoint: cannot be written or read, no space; storage of data or S3 fails",
        "yes, once the storage is back",
        helps=True,
    ),
    ExitCode(
        (BackendError.exit_code,),
        "5",
        "backend, environment, no rendezvous; or `recovery.max_same_step` failures at one step",
        "after the cause is removed",
        helps=False,
    ),
    ExitCode((DivergedError.exit_code,), "6", "diverged", "with another learning rate or clip", helps=False),
    ExitCode((HangError.exit_code,), "7", "hang, after all ranks wrote their stacks", "yes", helps=True),
    ExitCode((StoppedBySignal.exit_code,), "75", "stopped by a signal, state saved", "yes", helps=True),
    ExitCode(
        (126, 127), "126, 127", "the shell cannot start nxtrain", "after the environment is corrected", helps=False
    ),
    ExitCode(
        (NxtrainError.exit_code, *_SIGNALS),
        "1, 128 + n",
        "a crash, or the agent of another machine is gone; ended by signal n",
        "yes",
        helps=True,
    ),
)
"""Table of all exit codes of nxtrain's commands, and of the shell that starts a command."""

FINAL = frozenset[int]().union(*(kind.codes for kind in EXIT_CODES if not kind.helps)) - {0}
"""Exit codes of failures that a restart would repeat; after any other failure a restart may help."""

SHELL_FUNCTION = f"""\
is_worth_restart() {{    # docs/recovery.md has the codes
    case $1 in 0 | {" | ".join(map(str, sorted(FINAL)))}) false ;; esac
}}
"""
"""Shell function that is true for exit codes after which a restart may help."""
