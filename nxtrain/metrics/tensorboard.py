"""Writer of TensorBoard event files, one record at a time.

TensorBoard's own writer uses a thread that ends at the first full disk. Here, the caller of `log` gets the error. The
framing of records is implemented here, since TensorBoard's own imports boto3, which takes half a second.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from nxtrain.metrics.sinks import refuse_deleted

_PREFIX = "events.out.tfevents."


def _crc32c_of(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 * (byte & 1))  # Castagnoli's polynomial
    return byte


_CRC32C = [_crc32c_of(byte) for byte in range(256)]


class TensorBoardSink:
    """Sink that writes event files, one scalar per number; TensorBoard drops earlier values after the resume step."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Seconds since the epoch, or more to follow every file of the folder: TensorBoard reads files in name order.
        stamps = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in folder.glob(f"{_PREFIX}*")]
        stamp = max([int(time.time()), *(int(earlier) + 1 for earlier in stamps if earlier.isdigit())])
        name = f"{_PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        self._file = self._path.open("xb")
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        restart = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=resume_step + 1, session_log=restart))

    def log(self, record: Mapping[str, Any]) -> None:
        """Write a record, visible to readers at once."""
        refuse_deleted(self._file.fileno(), self._path)
        numbers = {key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}
        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        step = record["step"]
        self._add(Event(wall_time=time.time(), step=int(step), summary=Summary(value=values)))

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _add(self, event: Event) -> None:
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        checksums = (struct.pack("<I", _masked_crc32c(part)) for part in (length, content))
        self._file.write(length + next(checksums) + content + next(checksums))
        self._file.flush()


def _masked_crc32c(content: bytes) -> int:
    """Masked CRC-32C checksum of TFRecord files.

    Source: "TFRecords format details" of https://www.tensorflow.org/tutorials/load_data/tfrecord.
    """
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
