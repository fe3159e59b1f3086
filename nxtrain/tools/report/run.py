"""Reader of a run folder, complete or not; each missing or damaged file becomes a note."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nxtrain.common.errors import ConfigError, cause_of
from nxtrain.common.io.regular import read_text
from nxtrain.common.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, LOGS_DIR, METRICS_FILE, STARTS_FILE, SUMMARY_FILE
from nxtrain.config.tables import flatten, toml_value
from nxtrain.metrics.goodput import Goodput, RunStart, account
from nxtrain.metrics.start_log import read as read_starts
from nxtrain.tools.report.columns import Columns, read_columns

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FRESH_S = 90.0  # a start without an end counts as running for this many seconds after its last heartbeat
LONGEST_NAME = 80  # maximum length in characters of a run's name on a page


@dataclass(frozen=True)
class RecordedRun:
    """Contents of a run folder.

    Args:
        environment: Versions, devices and ranks of the newest start, by name.
    """

    folder: Path
    name: str  # name on the page, different from that of every other run
    columns: Columns = field(default_factory=Columns)
    starts: Sequence[RunStart] = ()
    config: Mapping[str, Any] = field(default_factory=dict)  # values of the configuration by dotted key
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)  # final evaluation
    notes: tuple[str, ...] = ()
    state: str = "unknown"  # `done`, `stopped`, `failed`, `killed`, `running`, or `unknown`

    @cached_property
    def goodput(self) -> Goodput:
        """Goodput of the run, with the division of its time."""
        return account(self.starts)

    def value(self, key: str) -> str:
        """Configuration value as TOML text; empty if unknown."""
        if key not in self.config:
            return ""
        return toml_value(self.config[key])

    def number(self, key: str) -> float | None:
        """Numeric configuration value; None if the key is missing or its value is not a number."""
        return number_at(self.config, key)


def number_at(table: Mapping[str, Any], key: str) -> float | None:
    """Numeric value of a table's key; None if the key is missing or its value is not a number."""
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Read run folders, and make the names of the runs unique.

    Raises:
        ConfigError: A folder does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            kind = "is a file, not a run folder" if folder.exists() else "does not exist"
            raise ConfigError(f"{folder} {kind}; name the folder of a run, which is the value of run.dir")
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    return [replace(run, name=shortened(f"{number}: {run.name}")) for number, run in enumerate(runs, 1)]


def read_run(folder: Path) -> RecordedRun:
    """Read a run folder; missing and damaged files become notes, never errors."""
    notes: list[str] = []
    columns = _columns(folder / METRICS_FILE, notes)
    starts = read_starts(folder / LOGS_DIR)
    config: dict[str, Any] = {}
    try:
        config = flatten(tomllib.loads(read_text(folder / CONFIG_FILE)))
    except FileNotFoundError:
        notes.append(f"there is no {CONFIG_FILE}: the configuration is unknown")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{CONFIG_FILE} cannot be read: {_reason(error)}")
    if not len(columns.steps) and not starts and not config:
        notes = [_foreign(folder), *notes]
    elif not starts:
        notes.append(f"there is no {LOGS_DIR}/{STARTS_FILE}: goodput and restarts are unknown")
    state = "unknown"
    if starts:
        is_fresh = time.time() - starts[-1].seen.wall < FRESH_S
        state = starts[-1].outcome or ("running" if is_fresh else "killed")
    if state == "running":
        notes.append("the run is still under way: the page shows the run up to this moment")
    name = str(config.get("run.name") or folder.resolve().name)
    return RecordedRun(
        folder,
        shortened(name),
        columns,
        starts,
        config,
        _json(folder / ENVIRONMENT_FILE, notes),
        _json(folder / SUMMARY_FILE, notes),
        tuple(notes),
        state,
    )


def printable(text: str) -> str:
    """Convert text to one line; characters that UTF-8 or a screen cannot show become U+FFFD."""
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))


def shortened(text: str, most: int = LONGEST_NAME) -> str:
    """Convert text to one printable line, and cut its middle if it exceeds `most` characters."""
    text = printable(text)
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}\u2026{text[-half:]}"


def _columns(file: Path, notes: list[str]) -> Columns:
    try:
        columns = read_columns(file)
    except FileNotFoundError:
        notes.append(f"there is no {METRICS_FILE}: no step was recorded")
        return Columns()
    except OSError as error:
        notes.append(f"{METRICS_FILE} cannot be read: {error.strerror or error}")
        return Columns()
    if not len(columns.steps):
        reason = "is damaged: it holds no record of nxtrain" if columns.damaged else "has no record yet"
        notes.append(f"{METRICS_FILE} {reason}")
    if columns.torn:
        notes.append(f"the last line of {METRICS_FILE} has no end: a run writes it, or was killed while it did")
    if columns.damaged:
        notes.append(f"{columns.damaged:,} lines of {METRICS_FILE} are not records of nxtrain, and are left out")
    if columns.repeated:
        notes.append(f"{columns.repeated:,} records of {METRICS_FILE} have the step of a later record, which counts")
    return columns


def _foreign(folder: Path) -> str:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return f"the folder cannot be read: {error.strerror or error}"
    if not names:
        return "the folder is empty: the run has not begun, or wrote elsewhere"
    shown = ", ".join(shortened(name, 30) for name in names[:3])
    return f"this is not a run folder of nxtrain: it has neither {CONFIG_FILE} nor records, but {shown}"


def _json(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(read_text(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{file.name} cannot be read: {_reason(error)}")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{file.name} holds no table")
        return {}
    return content


def _reason(error: Exception) -> str:
    return shortened(getattr(error, "strerror", None) or cause_of(error), 200)
