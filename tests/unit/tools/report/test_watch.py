"""Following of runs by their files: whole records only, over resumes, torn lines and damage."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.regular import open_regular
from nxtrain.common.run_folder import CHECKPOINTS_DIR, LATEST_FILE, LOGS_DIR, METRICS_FILE, START_FILE
from nxtrain.metrics.start_log import StartLog
from nxtrain.tools.report.watch import TAIL_BYTES, Followed, watch
from tests.support.run_folders import record, start, write_run


def beat(folder: Path, last: int, outcome: str = "", why: str = "", total: int = 60) -> None:
    """The run is at a step, or has ended there."""
    StartLog(folder / LOGS_DIR).replace(lambda: start(0, last, began=time.time() - 1.7e9 - 1, outcome=outcome, why=why))


def test_a_line_has_the_numbers_of_the_newest_record(tmp_path: Path) -> None:
    folder = write_run(tmp_path, records=[record(1, val_loss=4.0), record(20, mfu=0.381, saved_step=10)])
    beat(folder, 21)
    line, ended = Followed(folder).line()
    assert not ended
    assert line == (
        "step 21/60  loss 4.1180  val 4.0000  50k tokens/s  MFU 38.1%  grad norm 0.55  data 5%  3.0 GiB  "
        "saved 10  goodput 90%  compute-bound  0:00:06 left"
    )


@pytest.mark.parametrize(
    ("latest", "shown"),
    [
        ("step-00000060\n", "saved 60 "),
        ("", "saved 10 "),
        ("rubbish", "saved 10 "),
        ("step-" + "9" * 5000, "saved 10 "),
    ],
)
def test_the_newest_checkpoint_is_that_of_its_folder(tmp_path: Path, latest: str, shown: str) -> None:
    """The last checkpoint of a run is saved after the last record."""
    folder = write_run(tmp_path, records=[record(60, saved_step=10)])
    beat(folder, 60, outcome="done")
    (folder / CHECKPOINTS_DIR).mkdir(exist_ok=True)
    (folder / CHECKPOINTS_DIR / LATEST_FILE).write_text(latest)
    assert shown in Followed(folder).line()[0]


def test_the_verdict_is_about_several_records(tmp_path: Path) -> None:
    """The newest record has an evaluation, which takes most of its time and little of the run's."""
    records = [record(step) for step in range(1, 20)]
    folder = write_run(tmp_path, records=[*records, record(20, evaluation_s=0.05)])
    assert "compute-bound" not in Followed(folder).line()[0]
    assert "evaluation-bound" not in Followed(folder).line()[0]
    alone = write_run(tmp_path / "alone", records=[record(20, evaluation_s=0.05)])
    assert "evaluation-bound" in Followed(alone).line()[0]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_newest_whole_record_is_shown_however_the_file_grows(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes arrive in pieces; a resume drops the records after some step and writes others."""
    file = tmp_path / METRICS_FILE
    run, written, pending, step = Followed(tmp_path), b"", b"", 0
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()) or not written.count(b"\n"):
            step += 1
            pending += (json.dumps(record(step)) + "\n").encode()
            cut = data.draw(st.integers(0, len(pending)))
            written, pending = written + pending[:cut], pending[cut:]
        else:
            kept = data.draw(st.integers(0, written.count(b"\n")))
            written, pending = b"".join(line + b"\n" for line in written.split(b"\n")[:kept]), b""
            step = kept
        file.write_bytes(written)
        line, _ = run.line()
        if whole := written.count(b"\n"):
            assert line.startswith(f"step {whole}  loss {record(whole)['loss']:.4f}")


def test_a_long_file_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_run(tmp_path, steps=5) / METRICS_FILE
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(record(step)) + "\n" for step in range(6, 2000))
    assert file.stat().st_size > 4 * TAIL_BYTES
    read: list[int] = []
    real = open_regular

    def opened(path: Path) -> int:
        read.append(1)
        return real(path)

    monkeypatch.setattr("nxtrain.tools.report.watch.open_regular", opened)
    run = Followed(tmp_path)
    records = list(run._news())
    assert records[-1]["step"] == 1999
    assert len(records) < 300
    assert list(run._news()) == []
    assert read == [1, 1]


def not_begun(folder: Path) -> None:
    folder.mkdir()


def failed(folder: Path) -> None:
    beat(write_run(folder), 60, "failed", "rank 1 was killed")


def done(folder: Path) -> None:
    beat(write_run(folder), 60, "done")


def silent(folder: Path) -> None:
    write_run(folder)
    old = replace(start(0, 9, began=5.0), outcome="")
    StartLog(folder / LOGS_DIR).replace(lambda: old)


def damaged(folder: Path) -> None:
    write_run(folder)
    (folder / METRICS_FILE).write_bytes(b'\xff\n[1]\n{"step": "x", "loss": "\x1b[31m"}\n')
    (folder / "config.toml").write_text("[train\n", encoding="utf-8")
    (folder / LOGS_DIR / START_FILE).write_text("[]", encoding="utf-8")


def rubbish(folder: Path) -> None:
    done(folder)
    (folder / METRICS_FILE).write_bytes(bytes(range(200, 256)) * 2000)


def brackets(folder: Path) -> None:
    done(folder)
    (folder / METRICS_FILE).write_text("[" * 100_000, encoding="utf-8")


@pytest.mark.parametrize("num_records", [0, 1, 3, 2000])
@pytest.mark.parametrize("begun", ["", "{", '{"step": 4, "loss": 0.', '{"step": 4, "alarm": "x'])
def test_a_file_that_a_run_writes_is_not_damaged(tmp_path: Path, num_records: int, begun: str) -> None:
    """At any size: of a long file, the first line that is read is a part of one."""
    folder = write_run(tmp_path, records=[record(step) for step in range(1, num_records + 1)])
    followed = Followed(folder)
    with (folder / METRICS_FILE).open("a") as file:
        file.write(begun)
    assert "damaged" not in followed.line()[0]
    with (folder / METRICS_FILE).open("a") as file:
        file.write("rubbish\n" if not begun else "\n")
    assert ("damaged" in followed.line()[0]) is True


@pytest.mark.parametrize(
    ("make", "said", "ended"),
    [
        (not_begun, "has not begun", False),
        (failed, "failed: rank 1 was killed", False),
        (done, "done", True),
        (silent, "silent for ", False),
        (damaged, "step 0  metrics.jsonl is damaged", False),
        (rubbish, "metrics.jsonl is damaged", True),
        (brackets, "metrics.jsonl is damaged", True),
    ],
)
def test_the_state_of_a_run_is_said(tmp_path: Path, make: Callable[[Path], None], said: str, ended: bool) -> None:
    make(tmp_path / "run")
    line, over = Followed(tmp_path / "run").line()
    assert said in line
    assert over is ended


def test_runs_are_followed_until_all_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write_run(tmp_path / name, records=[record(30)]) for name in ("a", "b")]
    beat(folders[0], 60, "done")
    beat(folders[1], 30)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            beat(folders[1], 60, "stopped")

    monkeypatch.setattr(time, "sleep", sleep)
    log = io.StringIO()
    watch(folders, console=Console(file=log, width=400))
    lines = log.getvalue().splitlines()
    assert slept == [60.0, 60.0]  # plain lines come at most once a minute
    assert (
        len([line for line in lines if line.startswith("a  step 60/60")]) == 1
    )  # a line that says nothing new is left out
    assert lines[-1].startswith("b  step 60/60")
    assert lines[-1].endswith("stopped")


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder; name the folder of a run"):
        watch([tmp_path / "missing"])


def test_a_terminal_gets_one_line_that_changes(tmp_path: Path) -> None:
    folder = write_run(tmp_path, records=[record(30)])
    beat(folder, 60, "done")
    log = io.StringIO()
    watch([folder], console=Console(file=log, force_terminal=True, width=200))
    assert "step 60/60" in log.getvalue()
    assert "\x1b" in log.getvalue()
