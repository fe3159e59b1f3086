"""A run that ends at the same step again and again is refused, and only such a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.errors import CrashLoopError
from nxtrain.metrics.attempts import Attempts, progress
from nxtrain.run_folder import ATTEMPTS_FILE, LOGS_DIR, PROGRESS_FILE


def attempt(folder: Path, outcome: str, step: int, config: str = "a = 1") -> None:
    """One start that came to a step; `killed` says nothing."""
    attempts = Attempts(folder, config)
    attempts.refuse_loop(3)
    attempts.begin(5)
    attempts.reach(step, now=True)
    if outcome != "killed":
        attempts.end(outcome, step, "ValueError: why")


@pytest.mark.parametrize("outcomes", [["failed"] * 3, ["killed"] * 3, ["failed", "killed", "failed"]])
def test_three_failures_at_one_step_are_enough(tmp_path: Path, outcomes: list[str]) -> None:
    for outcome in outcomes:
        attempt(tmp_path, outcome, 7)
    told = "ValueError: why" if outcomes[-1] == "failed" else "it said nothing, as if killed"
    with pytest.raises(
        CrashLoopError, match=rf"last 3 attempts .* ended after step 7; of the last one is known: {told}"
    ):
        attempt(tmp_path, "failed", 7)
    Attempts(tmp_path, "a = 1").refuse_loop(0)
    Attempts(tmp_path, "a = 2").refuse_loop(3)
    (tmp_path / LOGS_DIR / ATTEMPTS_FILE).unlink()
    Attempts(tmp_path, "a = 1").refuse_loop(3)


@pytest.mark.parametrize(
    "course",
    [
        [("failed", 7), ("failed", 8), ("failed", 7), ("failed", 7)],
        [("failed", 7), ("failed", 7), ("stopped", 7), ("failed", 7), ("failed", 7)],
        [("killed", 7), ("killed", 7), ("done", 9), ("killed", 7)],
    ],
)
def test_another_step_or_a_good_end_counts_anew(tmp_path: Path, course: list[tuple[str, int]]) -> None:
    for outcome, step in course:
        attempt(tmp_path, outcome, step)
    Attempts(tmp_path, "a = 1").refuse_loop(3)


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    for _ in range(3):
        attempt(tmp_path, "killed", 7)
        with (tmp_path / LOGS_DIR / ATTEMPTS_FILE).open("a") as file:
            file.write('{"event": "en')
    with pytest.raises(CrashLoopError):
        Attempts(tmp_path, "a = 1").refuse_loop(3)


def test_progress_is_written_once_in_a_while(tmp_path: Path) -> None:
    file = tmp_path / LOGS_DIR / PROGRESS_FILE
    assert progress(file) == -1
    attempts = Attempts(tmp_path, "")
    attempts.begin(3)
    attempts.reach(4)
    assert progress(file) == 3
    attempts.end("failed", 5)
    assert progress(file) == 5


@pytest.mark.parametrize(
    "spoilt", [b"\xff\xfe\n", b"[1, 2]\n", b"7\n", b"null\n", b'{"event": "start"}\n', b"{}\n", b"[" * 9999 + b"\n"]
)
def test_lines_that_are_none_keep_no_run_from_its_start(tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / LOGS_DIR).mkdir()
    for outcome in ("failed", "killed", "failed"):
        with (tmp_path / LOGS_DIR / ATTEMPTS_FILE).open("ab") as file:
            file.write(spoilt)
        attempt(tmp_path, outcome, 7)
    with pytest.raises(CrashLoopError, match="the last 3 attempts"):
        Attempts(tmp_path, "a = 1").refuse_loop(3)
    (tmp_path / LOGS_DIR / PROGRESS_FILE).write_bytes(spoilt)
    assert progress(tmp_path / LOGS_DIR / PROGRESS_FILE) == -1
