"""TensorBoard event files, written by TensorBoard's own writer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardSink:
    """Event files with one scalar per key, under the names of the metrics file.

    Args:
        folder: Folder of the event files; made if absent.
        resume_step: Last step that stands; TensorBoard drops what earlier files hold beyond it.
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        self._writer = EventFileWriter(str(folder))
        restart = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=restart))

    def log(self, record: Mapping[str, float | None]) -> None:
        """Write the record, and flush it so that a reader sees it now."""
        values = [Summary.Value(tag=k, simple_value=v) for k, v in record.items() if k != "step" and v is not None]
        step = record["step"]
        assert step is not None, record
        self._writer.add_event(Event(wall_time=time.time(), step=int(step), summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and end the writer's thread."""
        self._writer.close()
