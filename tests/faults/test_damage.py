"""A checkpoint that is no longer what was written is found before it is used, and the one before it taken."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.manifest import read_manifest
from nxtrain.common.errors import CheckpointError
from nxtrain.common.io import read_retry
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from tests.support import commands
from tests.support.recovery import Golden, History, Start, assert_recovered, configure, last_step, start, supervise
from tests.support.runs import course

WEIGHTS = "rank-00001.safetensors"
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def killed(started_by: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Start]:
    """A run with checkpoints of steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("killed")
    configure(folder)
    result = start(started_by, folder, ["kill@1:11:fwd"], overrides=["checkpoint.async=false"])
    assert result.saved == (3, 6, 9)
    return folder, result


def copied(folder: Path, to: Path) -> list[Path]:
    """A run as it was left, in another place; its checkpoints, the newest first."""
    shutil.copytree(folder / "run", to / "run")
    configure(to)
    return directory.list_checkpoints(to / "run" / CHECKPOINTS_DIR)[::-1]


def cut(size: Callable[[int], int]) -> Callable[[Path], Path]:
    def damage(checkpoint: Path) -> Path:
        file = checkpoint / WEIGHTS
        with file.open("r+b") as opened:
            opened.truncate(size(file.stat().st_size))
        return file

    return damage


def blank(checkpoint: Path) -> Path:
    file = checkpoint / WEIGHTS
    content = file.read_bytes()
    middle = len(content) // 2 // PAGE_BYTES * PAGE_BYTES
    file.write_bytes(content[:middle] + bytes(PAGE_BYTES) + content[middle + PAGE_BYTES :])
    assert file.read_bytes() != content
    return file


def flip_in(kind: str) -> Callable[[Path], Path]:
    """Turn over one bit of the last tensor of a kind."""

    def damage(checkpoint: Path) -> Path:
        tensors = read_manifest(checkpoint).tensors
        entry = [entry for key, entry in tensors.items() if key.startswith(f"{kind}/")][-1]
        _, file, first = [*entry.parts()][-1]
        return flip(checkpoint / file, first)

    return damage


def flip(file: Path, at: int) -> Path:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    return file


def flip_manifest(checkpoint: Path) -> Path:
    file = checkpoint / directory.MANIFEST
    return flip(file, file.read_bytes().index(b'"xxh3"') + 10)


def flip_cursor(checkpoint: Path) -> Path:
    """Another number of samples, which is where the data goes on."""
    file = checkpoint / directory.META
    return flip(file, file.read_bytes().index(b'"samples": ') + 11)


def remove(checkpoint: Path) -> Path:
    (checkpoint / WEIGHTS).unlink()
    return checkpoint / WEIGHTS


DAMAGES: dict[str, Callable[[Path], Path]] = {
    "one byte less": cut(lambda size: size - 1),
    "half of it": cut(lambda size: size // 2),
    "zeros": blank,
    "absent": remove,
    "weights": flip_in("model"),
    "moments": flip_in("exp_avg_sq"),
    "manifest": flip_manifest,
    "cursor": flip_cursor,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_the_one_before_is_taken(
    started_by: ForkServerContext,
    tmp_path: Path,
    golden: Golden,
    killed: tuple[Path, Start],
    damage: Callable[[Path], Path],
) -> None:
    folder, before = killed
    file = damage(copied(folder, tmp_path)[0])
    again = supervise(started_by, tmp_path)
    assert_recovered(History(tmp_path, [before, *again.starts], again.wall_s), golden)
    (result,) = again.starts
    assert result.began_after == 6
    (line,) = [line for line in result.said[0].splitlines() if "damaged" in line]
    assert line.startswith(f"{file} is damaged: "), line
    assert "put aside as step-00000009.corrupt, and the one before it is tried" in line
    assert directory.quarantined(again.checkpoints) == [again.checkpoints / "step-00000009.corrupt"]


def test_without_any_that_is_whole_nothing_starts(
    started_by: ForkServerContext, tmp_path: Path, killed: tuple[Path, Start]
) -> None:
    """Not from scratch either, however often it is started: what was damaged may be what a person can mend."""
    checkpoints = copied(killed[0], tmp_path)
    for checkpoint, damage in zip(checkpoints, ("zeros", "manifest", "cursor"), strict=True):
        DAMAGES[damage](checkpoint)
    record = (tmp_path / "run/metrics.jsonl").read_bytes()
    for _ in range(2):
        result = start(started_by, tmp_path)
        assert set(result.codes.values()) == {CheckpointError.exit_code}, result.said
        assert result.began_after is None
        assert "error: rank 0: every checkpoint of" in result.said[0], result.said
        assert "checkpoint.resume=never" in result.said[0]
        assert "Traceback" not in result.said[0] + result.said[1]
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == record
    assert last_step(tmp_path) == killed[1].reached
    aside = directory.quarantined(tmp_path / "run" / CHECKPOINTS_DIR)
    assert [path.name for path in aside] == [f"step-0000000{step}.corrupt" for step in (3, 6, 9)]


def _fail_reads(times: int, within: str = "step-") -> None:
    """Let the first reads of files of some checkpoints fail, with short pauses between them."""
    read, left = os.preadv, times

    def fail(file: int, *rest: Any) -> int:
        nonlocal left
        path = os.readlink(f"/proc/self/fd/{file}")
        if ".safetensors" in path and within in path:
            left -= 1
            if left >= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, *rest)

    os.preadv = fail
    read_retry.PAUSES_S = (0.01,) * 4


def test_a_disk_that_fails_for_a_while_damages_nothing(tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    commands.write_config(tmp_path)
    assert commands.train(tmp_path, armed="kill@0:12:fwd,sleep@*:1:fwd:0.05")[0] == -signal.SIGKILL
    checkpoints = tmp_path / "run" / CHECKPOINTS_DIR
    before = [path.name for path in directory.list_checkpoints(checkpoints)]
    assert before == ["step-00000004", "step-00000008"]
    for _ in range(2):  # an agent starts again at once
        output = commands.trained(tmp_path, first=partial(_fail_reads, 10**6), code=CheckpointError.exit_code)
        assert "so the storage itself fails" in output
        assert "Traceback" not in output
        assert not directory.quarantined(checkpoints)
        assert [path.name for path in directory.list_checkpoints(checkpoints)] == before
    output = commands.trained(tmp_path, first=partial(_fail_reads, 2))
    assert "Input/output error; it is read again" in output
    assert "continues after step 8" in output
    assert course(tmp_path / "run") == straight


def test_one_that_alone_cannot_be_read_is_left_for_the_one_before(
    tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    """Bad sectors: they are not a reason to wait for somebody."""
    commands.write_config(tmp_path)
    assert commands.train(tmp_path, armed="kill@0:12:fwd,sleep@*:1:fwd:0.05")[0] == -signal.SIGKILL
    output = commands.trained(tmp_path, first=partial(_fail_reads, 10**6, "step-00000008"))
    assert "continues after step 4" in output
    assert "put aside as abandoned, since no part of it any more: step-00000008" in output
    assert course(tmp_path / "run") == straight


def test_the_only_one_is_never_a_reason_to_start_from_scratch(tmp_path: Path) -> None:
    commands.write_config(tmp_path)
    assert commands.train(tmp_path, armed="kill@0:7:fwd,sleep@*:1:fwd:0.05")[0] == -signal.SIGKILL
    output = commands.trained(tmp_path, first=partial(_fail_reads, 10**6), code=CheckpointError.exit_code)
    assert "step-00000004 of" in output
    assert "cannot be read, and there is none before it" in output
    assert directory.newest(tmp_path / "run" / CHECKPOINTS_DIR) == tmp_path / "run" / CHECKPOINTS_DIR / "step-00000004"
