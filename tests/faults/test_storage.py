"""Storage that is full, read-only, broken or slow costs checkpoints and nothing else, and the run says which."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from nxtrain.checkpoint import directory
from nxtrain.common.errors import CheckpointError
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from tests.support.command_ranks import Ranks
from tests.support.recovery import PACE, Golden, History, assert_recovered, configure, last_step, start, supervise
from tests.support.run_folders import small_disk

OFTEN = ("checkpoint.every=2", "checkpoint.keep=2")
ROOM_BYTES = 5 << 20
"""For two checkpoints of 2 MB and not for three."""

FILE_BYTES = 1 << 16
"""More than a log has, less than a rank's file."""

LEFT_OUT = "WARNING: no checkpoint of step {}: "


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own under a run's checkpoints."""
    with small_disk(tmp_path / "run" / CHECKPOINTS_DIR, ROOM_BYTES) as folder:
        yield folder


def once(output: str, act: Callable[[Ranks], object]) -> Callable[[Ranks], None]:
    """Do something when the first rank has said something."""
    done = False

    def look(ranks: Ranks) -> None:
        nonlocal done
        if not done and output in ranks.said()[0]:
            done = True
            act(ranks)

    return look


def remount(folder: Path, option: str) -> None:
    subprocess.run(("mount", "-o", f"remount,{option}", str(folder)), check=True)


def test_a_disk_that_is_full_and_gets_room(
    started_by: ForkServerContext, tmp_path: Path, golden: Golden, disk: Path
) -> None:
    configure(tmp_path)
    seen: list[str] = []

    def make_room(ranks: Ranks) -> None:
        seen.extend(sorted(path.name for path in disk.glob("step-*") if not path.name.startswith("step-00000008.tmp-")))
        remount(disk, "size=32m")

    result = start(
        started_by,
        tmp_path,
        ["sleep@*:1:fwd:0.1"],
        overrides=OFTEN,
        meanwhile=once(LEFT_OUT.format(6), make_room),
    )
    assert_recovered(History(tmp_path, [result]), golden, restarts=0)
    assert "No space left on device" in result.said[0]
    assert seen == ["step-00000002", "step-00000004"], "older ones stay, and of what failed nothing does"
    assert result.said[0].count("WARNING") <= 2, "the next one after there is room is written"


def test_a_disk_that_becomes_read_only_for_a_while(
    started_by: ForkServerContext, tmp_path: Path, golden: Golden, disk: Path
) -> None:
    configure(tmp_path)
    remount(disk, "size=32m")
    locked = False

    def look(ranks: Ranks) -> None:
        nonlocal locked
        if not locked and directory.newest(disk) and subprocess.call(("mount", "-o", "remount,ro", str(disk))) == 0:
            locked = True
        unlock(ranks)

    unlock = once("Read-only file system", lambda ranks: remount(disk, "rw"))
    result = start(started_by, tmp_path, ["sleep@*:1:fwd:0.1"], overrides=["checkpoint.every=2"], meanwhile=look)
    assert_recovered(History(tmp_path, [result]), golden, restarts=0)
    assert locked
    assert "training goes on" in result.said[0]


def test_files_that_may_not_grow_for_a_while(started_by: ForkServerContext, tmp_path: Path, golden: Golden) -> None:
    configure(tmp_path)
    limited = False

    def limit(ranks: Ranks, size: int) -> None:
        for process in ranks.processes:
            resource.prlimit(process.pid or 0, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def look(ranks: Ranks) -> None:
        nonlocal limited
        if not limited:
            limited = True
            limit(ranks, FILE_BYTES)
        lift(ranks)

    lift = once(LEFT_OUT.format(3), lambda ranks: limit(ranks, resource.RLIM_INFINITY))
    result = start(started_by, tmp_path, ["sleep@*:1:fwd:0.05"], meanwhile=look)
    assert_recovered(History(tmp_path, [result]), golden, restarts=0)
    assert "File too large; raise the limit on the size of files (ulimit -f); training goes on" in result.said[0]


def test_errors_of_the_disk(started_by: ForkServerContext, tmp_path: Path, golden: Golden) -> None:
    """In one checkpoint after the other, at each part of a save."""
    configure(tmp_path)
    expected = {
        2: ("oserror@1:2:ckpt_write:ENOSPC", "No space left on device"),
        4: ("oserror@0:4:ckpt_fsync:EIO", "Input/output error"),
        6: ("oserror@0:6:ckpt_commit:EROFS", "Read-only file system"),
        8: ("oserror@0:8:ckpt_rename:EACCES", "Permission denied"),
    }
    overrides = ["checkpoint.async=false", "checkpoint.every=2"]
    history = supervise(started_by, tmp_path, [fault for fault, _ in expected.values()], overrides=overrides)
    assert_recovered(history, golden, restarts=0)
    lines = [line for line in history.said.splitlines() if "WARNING" in line]
    for line, (step, (_, words)) in zip(lines, expected.items(), strict=True):
        assert line.startswith(LEFT_OUT.format(step)), line
        assert line.endswith("; training goes on")
        assert words in line


def test_a_name_for_the_newest_that_fails_is_told_and_costs_nothing(
    started_by: ForkServerContext, tmp_path: Path, golden: Golden
) -> None:
    configure(tmp_path)
    overrides = ("checkpoint.async=false", "checkpoint.strict=true")
    history = supervise(started_by, tmp_path, ["oserror@0:6:ckpt_latest:ENOSPC"], overrides=overrides)
    assert_recovered(history, golden, restarts=0)
    (line,) = [line for line in history.said.splitlines() if "WARNING" in line]
    assert "cannot record step-00000006 as the newest checkpoint of" in line
    assert line.endswith("the checkpoint of step 6 is there, and training goes on")


def test_an_error_of_the_disk_is_told_before_the_next_checkpoint_is_due(
    started_by: ForkServerContext, tmp_path: Path, golden: Golden
) -> None:
    configure(tmp_path)
    told_at: list[int] = []
    look = once(LEFT_OUT.format(5), lambda ranks: told_at.append(last_step(tmp_path)))
    faults = ["sleep@*:1:fwd:0.1", "oserror@1:5:ckpt_write"]
    result = start(started_by, tmp_path, faults, overrides=["checkpoint.every=5"], meanwhile=look)
    assert_recovered(History(tmp_path, [result]), golden, restarts=0)
    assert told_at[0] < 10


@pytest.mark.parametrize("written", ["checkpoint.async=false", "checkpoint.async=true"])
def test_an_error_of_the_disk_ends_a_strict_run(
    started_by: ForkServerContext, tmp_path: Path, golden: Golden, written: str
) -> None:
    configure(tmp_path)
    overrides = ("checkpoint.strict=true", written)
    history = supervise(started_by, tmp_path, ["sleep@*:1:fwd:0.1", "oserror@1:6:ckpt_write"], overrides=overrides)
    assert set(history.starts[0].codes.values()) == {CheckpointError.exit_code}, history.said
    assert "error: rank 0: no checkpoint of step 6: " in history.said
    assert_recovered(history, golden)


@pytest.mark.alone
def test_a_slow_disk_slows_no_step(started_by: ForkServerContext, tmp_path: Path, golden: Golden) -> None:
    configure(tmp_path)
    slow_s = 2.0
    passed: dict[int, float] = {}
    result = start(
        started_by,
        tmp_path,
        [PACE, f"sleep@*:3:ckpt_write:{slow_s}"],
        meanwhile=lambda ranks: passed.setdefault(last_step(tmp_path), time.monotonic()),
    )
    assert_recovered(History(tmp_path, [result]), golden, restarts=0)
    first, last = min(step for step in passed if step >= 3), max(step for step in passed if step < 12)
    assert last - first >= 5, passed
    assert passed[last] - passed[first] < slow_s / 2, "eight steps while one checkpoint is written"
    assert LEFT_OUT.format(6) + "the one before it is still being written" in result.said[0]
