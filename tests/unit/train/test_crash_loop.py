"""A run that ends at the same step again and again is refused, and only such a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from nxtrain.common.errors import CrashLoopError
from nxtrain.common.run_folder import LOGS_DIR, START_FILE, STARTS_FILE
from nxtrain.metrics.goodput_meter import GoodputMeter
from nxtrain.metrics.start_log import last_step
from nxtrain.train.supervision.preflight import fingerprint, refuse_crash_loop

End = Literal["done", "stopped", "failed", "killed"]
CONFIG = fingerprint("a = 1")


def start(folder: Path, end: End, step: int, *, asked: str = "") -> None:
    """Start once, reach a step and end; a killed start writes no end."""
    refuse_crash_loop(folder / LOGS_DIR, CONFIG, 3)
    meter = GoodputMeter(folder / LOGS_DIR, config=CONFIG)
    meter.begin(5)
    meter.finish(step)
    meter._next_beat = 0.0
    meter.beat()
    if asked:
        meter.stopping(asked)
    if end != "killed":
        meter.end(end, "ValueError: why")


def refuse(folder: Path, most: int = 3, config: str = CONFIG) -> None:
    refuse_crash_loop(folder / LOGS_DIR, config, most)


@pytest.mark.parametrize("ends", [["failed"] * 3, ["killed"] * 3, ["failed", "killed", "failed"]])
def test_three_failures_at_one_step_are_enough(tmp_path: Path, ends: list[End]) -> None:
    for end in ends:
        start(tmp_path, end, 7)
    why = "ValueError: why" if ends[-1] == "failed" else "no message, as if the process was killed"
    with pytest.raises(CrashLoopError, match=rf"last 3 starts .* failed after step 7; the last error was: {why}"):
        start(tmp_path, "failed", 7)
    refuse(tmp_path, most=0)
    refuse(tmp_path, config=fingerprint("a = 2"))
    (tmp_path / LOGS_DIR / STARTS_FILE).unlink()
    refuse(tmp_path)


@pytest.mark.parametrize(
    "starts",
    [
        [("failed", 7), ("failed", 8), ("failed", 7), ("failed", 7)],
        [("failed", 7), ("failed", 7), ("stopped", 7), ("failed", 7), ("failed", 7)],
        [("killed", 7), ("killed", 7), ("done", 9), ("killed", 7)],
    ],
)
def test_another_step_or_a_good_end_counts_anew(tmp_path: Path, starts: list[tuple[End, int]]) -> None:
    for end, step in starts:
        start(tmp_path, end, step)
    refuse(tmp_path)


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_a_start_that_was_asked_to_stop_has_not_failed(tmp_path: Path, end: End) -> None:
    for _ in range(3):
        start(tmp_path, end, 7, asked="SIGTERM at rank 0")
    refuse(tmp_path)


def test_failures_under_another_configuration_do_not_count(tmp_path: Path) -> None:
    for config in ("a = 2", "a = 1", "a = 1"):
        meter = GoodputMeter(tmp_path / LOGS_DIR, config=fingerprint(config))
        meter.begin(5)
        meter.end("failed")
    refuse(tmp_path)


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    for _ in range(3):
        start(tmp_path, "killed", 7)
        with (tmp_path / LOGS_DIR / STARTS_FILE).open("a") as file:
            file.write('{"event": "en')
    with pytest.raises(CrashLoopError):
        refuse(tmp_path)


def test_the_last_step_is_written_at_the_begin_at_the_end_and_once_in_a_while(tmp_path: Path) -> None:
    assert last_step(tmp_path) == -1
    meter = GoodputMeter(tmp_path)
    meter.begin(3)
    assert last_step(tmp_path) == 3
    meter.beat()
    meter.finish(4)
    meter.beat()
    assert last_step(tmp_path) == 3, "a beat within a second of the last writes nothing"
    meter.finish(5)
    meter.end("failed")
    assert last_step(tmp_path) == 5


@pytest.mark.parametrize(
    "spoilt", [b"\xff\xfe\n", b"[1, 2]\n", b"7\n", b"null\n", b'{"event": "start"}\n', b"{}\n", b"[" * 9999 + b"\n"]
)
def test_spoilt_lines_keep_no_run_from_its_start(tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / LOGS_DIR).mkdir()
    ends: list[End] = ["failed", "killed", "failed"]
    for end in ends:
        with (tmp_path / LOGS_DIR / STARTS_FILE).open("ab") as file:
            file.write(spoilt)
        start(tmp_path, end, 7)
    with pytest.raises(CrashLoopError, match="the last 3 starts"):
        refuse(tmp_path)
    (tmp_path / LOGS_DIR / START_FILE).write_bytes(spoilt)
    assert last_step(tmp_path / LOGS_DIR) == -1
