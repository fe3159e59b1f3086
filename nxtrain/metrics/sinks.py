"""Where the record of a step goes: the metrics file, event files, the progress display.

A run that resumes at step k repeats the steps after k, so each sink first forgets what an earlier process wrote about
them: whatever happened, a step stands in the record once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nxtrain.metrics.progress import open_progress

if TYPE_CHECKING:
    from nxtrain.config.schema import MetricsConfig

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"


class Sink(Protocol):
    """A reader of step records."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record; `step` is among its keys, None means unknown; not all values need be numbers."""
        ...

    def close(self) -> None:
        """Make everything durable and let go of files and screen."""
        ...


class JsonlSink:
    """One JSON object a line, readable while the run goes on.

    Args:
        path: File to append to; made if absent.
        resume_step: Last step that stands; later lines and torn ones are taken out.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        if path.exists():
            _forget_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        """Append the record in one write. JSON knows no NaN: a value that is not finite becomes null."""
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_sinks(config: MetricsConfig, run_dir: Path, total_steps: int, resume_step: int, leader: bool) -> list[Sink]:
    """Open what the configuration asks for.

    Args:
        config: The `[metrics]` section.
        run_dir: Folder of the run; it exists.
        total_steps: Last step of the run.
        resume_step: Finished steps of the checkpoint that the run starts from; 0 from scratch.
        leader: This rank speaks for the run; the others get no sinks.
    """
    if not leader:
        return []
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS_FILE, resume_step=resume_step)]
    if config.tensorboard:
        from nxtrain.metrics.events import TensorBoardSink  # its imports take a second, and only leaders need them

        sinks.append(TensorBoardSink(run_dir / TENSORBOARD_DIR, resume_step=resume_step))
    if config.progress:
        sinks.append(open_progress(total_steps, resume_step))
    return sinks


def _forget_after(path: Path, step: int) -> None:
    """Keep the whole lines up to `step`; the file is replaced in one move, so a crash here loses nothing."""
    repaired = path.with_name(path.name + ".tmp")
    with path.open("rb") as old, repaired.open("wb") as new:
        new.writelines(line.rstrip(b"\n") + b"\n" for line in old if _stands(line, step))
        new.flush()
        os.fsync(new.fileno())
    repaired.replace(path)


def _stands(line: bytes, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except ValueError:
        return False
