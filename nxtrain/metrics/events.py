"""TensorBoard event files, written by TensorBoard's own writer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardSink:
    """Event files with one scalar per number, under the names of the metrics file.

    Args:
        folder: Folder of the event files; made if absent.
        resume_step: Last step that stands; TensorBoard drops what earlier files hold beyond it.
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        self._writer = EventFileWriter(str(folder))
        restart = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=restart))

    def log(self, record: Mapping[str, Any]) -> None:
        """Write the record, and flush it so that a reader sees it now."""
        numbers = {key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}
        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        step = record["step"]
        self._writer.add_event(Event(wall_time=time.time(), step=int(step), summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and end the writer's thread."""
        self._writer.close()
