"""Logs and notes on disks that are full or fail."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nxtrain.checkpoint import directory
from nxtrain.common.errors import CheckpointError, RestartError
from nxtrain.common.io.jsonl import JsonlLog
from nxtrain.common.run_folder import CHECKPOINTS_DIR, METRICS_FILE
from nxtrain.train.health.numerics import NON_FINITE
from tests.support.commands import at_batch, train, trained, write_config
from tests.support.run_folders import small_disk
from tests.support.runs import course

STEPS = 12
METRICS_WARNING = f"warning: {METRICS_FILE} cannot be written: "


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    write_config(folder, steps=STEPS)
    trained(folder)
    return folder / "run"


def last_weights(run: Path) -> str:
    path = directory.step_path(run / CHECKPOINTS_DIR, STEPS) / "rank-00000.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def assert_same(run: Path, straight: Path) -> None:
    assert course(run) == course(straight)
    assert last_weights(run) == last_weights(straight)


def test_a_record_that_failed_once_is_written_with_the_next(tmp_path: Path, straight: Path) -> None:
    write_config(tmp_path, steps=STEPS)
    output = trained(tmp_path, armed="oserror@0:5:log:EIO,oserror@0:6:log:ENOSPC")
    assert output.count("cannot be written") == 1, output
    assert f"{METRICS_WARNING}Input/output error" in output
    assert f"{METRICS_FILE} is written again, up to step" in output
    assert_same(tmp_path / "run", straight)


def test_a_disk_that_stays_full_for_logs_is_told_once_and_ends_nothing(tmp_path: Path, straight: Path) -> None:
    write_config(tmp_path, steps=STEPS)
    output = trained(tmp_path, armed="oserror!@0:*:log")
    assert output.count("cannot be written") == 1, output
    assert f"warning: {STEPS} records are missing in {METRICS_FILE}" in output
    assert last_weights(tmp_path / "run") == last_weights(straight)


def _let_no_file_grow(metrics: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 50, resource.RLIM_INFINITY))


def _delete_logs(run: Path) -> None:
    shutil.rmtree(run / "tensorboard")
    (run / METRICS_FILE).unlink()


def test_a_limit_of_the_system_tears_a_line_which_the_next_start_repairs(tmp_path: Path, straight: Path) -> None:
    write_config(tmp_path, steps=STEPS)
    # Nothing but logs is written, whose files are full after some steps. The limit is the size of six records at most,
    # since the events of all steps take more than these.
    nothing_else = ("checkpoint.every=0", "metrics.tensorboard=true")
    output = trained(
        tmp_path, *nothing_else, first=partial(at_batch, 7, partial(_let_no_file_grow, tmp_path / "run" / METRICS_FILE))
    )
    assert output.count(f"{METRICS_WARNING}File too large") == 1, output
    assert output.count("warning: tensorboard cannot be written: File too large") == 1, output
    torn = (tmp_path / "run" / METRICS_FILE).read_bytes()
    assert not torn.endswith(b"\n")
    assert 0 < torn.count(b"\n") < STEPS
    output = trained(tmp_path, "metrics.tensorboard=true")
    assert "warning" not in output
    assert_same(tmp_path / "run", straight)
    assert tensorboard_steps(tmp_path / "run") == [*range(1, STEPS + 1)]


def test_places_that_are_taken_by_something_else_cost_only_the_logs(tmp_path: Path, straight: Path) -> None:
    """As on a read-only file system, which root does not meet here: nothing can be made there."""
    write_config(tmp_path, steps=STEPS)
    run = tmp_path / "run"
    (run / METRICS_FILE).mkdir(parents=True)
    (run / "tensorboard").touch()
    (run / "logs").touch()
    output = trained(tmp_path, "metrics.tensorboard=true")
    assert output.count(f"{METRICS_WARNING}Is a directory") == 1, output
    assert output.count("warning: tensorboard cannot be written: ") == 1, output
    assert output.count("warning: this start is not noted in run.dir/logs: ") == 1, output
    assert "Traceback" not in output
    assert last_weights(run) == last_weights(straight)


def tensorboard_steps(run: Path) -> list[int]:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


def _tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-17])


def _spoil_middle(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\xff\xfe garbage\n", b"[1, 2]\n", *lines[1:], b"{"]))


@pytest.mark.parametrize("spoil", [_tear, _spoil_middle])
def test_a_spoilt_record_and_deleted_event_files_are_mended_by_the_next_start(
    tmp_path: Path, straight: Path, spoil: Any
) -> None:
    write_config(tmp_path, steps=STEPS)
    trained(tmp_path, "metrics.tensorboard=true", armed="raise@0:7:fwd", code=1)
    spoil(tmp_path / "run" / METRICS_FILE)
    shutil.rmtree(tmp_path / "run/tensorboard")
    output = trained(tmp_path, "metrics.tensorboard=true", armed="raise@0:7:fwd")
    assert_same(tmp_path / "run", straight)
    # The checkpoint of step 4 may not have been written yet.
    first = 5 if "continues after step 4\n" in output else 1
    assert tensorboard_steps(tmp_path / "run") == [*range(first, STEPS + 1)]


def test_logs_that_are_deleted_while_the_run_goes_on_are_begun_anew(tmp_path: Path, straight: Path) -> None:
    write_config(tmp_path, steps=STEPS)
    run = tmp_path / "run"
    output = trained(tmp_path, "metrics.tensorboard=true", first=partial(at_batch, 8, partial(_delete_logs, run)))
    assert output.count("was deleted; training goes on") == 2, output
    told_steps = [record["step"] for record in course(run)]
    assert told_steps[-1] == STEPS
    assert told_steps == [*range(told_steps[0], STEPS + 1)]
    assert course(run) == course(straight)[told_steps[0] - 1 :]
    assert tensorboard_steps(run) == told_steps
    assert last_weights(run) == last_weights(straight)


ROOM_BYTES = 1 << 20
BAD_STEP = 6
ALWAYS_BAD = f"nan!@0:{BAD_STEP}:reduce,sleep@0:1:pre_step:0.05"


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own under a run's logs."""
    with small_disk(tmp_path / "run" / "logs", ROOM_BYTES) as folder:
        yield folder


def fill(folder: Path) -> None:
    """Leave no byte free, nor any at the end of the last page of the notes."""
    notes = folder / NON_FINITE
    if notes.exists():
        with notes.open("ab") as file:
            file.write(b"\n" * (-notes.stat().st_size % os.sysconf("SC_PAGE_SIZE")))
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def fill_and_free(folder: Path) -> None:
    """Fill it before the bad step, and give room behind it."""
    at_batch(BAD_STEP + 4, (folder / "filler").unlink)
    at_batch(BAD_STEP - 1, partial(fill, folder))


def verdicts(logs: Path) -> list[str]:
    return [line["verdict"] for line in JsonlLog(logs / NON_FINITE).read()]


def test_no_verdict_is_forgotten_on_a_full_disk(tmp_path: Path, logs: Path) -> None:
    write_config(tmp_path, steps=12, every=2)
    policy = "recovery.non_finite=rollback"
    output = trained(
        tmp_path,
        policy,
        armed=ALWAYS_BAD,
        first=partial(at_batch, 2, partial(fill, logs)),
        code=CheckpointError.exit_code,
    )
    assert "recovery.non_finite=rollback is not possible, since" in output
    assert f"{NON_FINITE} cannot be written: No space left on device. Make room for it" in output
    assert verdicts(logs) == []

    (logs / "filler").unlink()
    trained(tmp_path, policy, armed=ALWAYS_BAD, code=RestartError.exit_code)
    assert verdicts(logs) == ["rolled_back"]

    output = trained(tmp_path, policy, armed=ALWAYS_BAD, first=partial(fill_and_free, logs))
    assert f"step {BAD_STEP} is not finite again" in output
    assert "until it is, it lacks {" in output
    assert "is written again, and lacks nothing" in output
    assert verdicts(logs) == ["rolled_back", "persistent"]

    skips = tmp_path / "skips"
    write_config(skips, steps=12, every=2)
    assert train(skips, "recovery.non_finite=skip", armed=ALWAYS_BAD)[0] == 0
    assert course(tmp_path / "run") == course(skips / "run")
