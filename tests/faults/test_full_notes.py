"""A disk that is full when a bad step is rolled back: nothing is decided that the next start would not know."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from nxtrain.common.errors import CheckpointError, RestartError
from nxtrain.common.io.jsonl import JsonlLog
from nxtrain.train.health.numerics import NON_FINITE
from tests.support.commands import at_batch, train, write_config
from tests.support.run_folders import small_disk
from tests.support.runs import course

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
    code, output = train(tmp_path, policy, armed=ALWAYS_BAD, first=partial(at_batch, 2, partial(fill, logs)))
    assert code == CheckpointError.exit_code, output
    assert "recovery.non_finite=rollback is not possible, since" in output
    assert f"{NON_FINITE} cannot be written: No space left on device. Make room for it" in output
    assert verdicts(logs) == []

    (logs / "filler").unlink()
    code, output = train(tmp_path, policy, armed=ALWAYS_BAD)
    assert code == RestartError.exit_code, output
    assert verdicts(logs) == ["rolled_back"]

    code, output = train(tmp_path, policy, armed=ALWAYS_BAD, first=partial(fill_and_free, logs))
    assert code == 0, output
    assert f"step {BAD_STEP} is not finite again" in output
    assert "until it is, it lacks {" in output
    assert "is written again, and lacks nothing" in output
    assert verdicts(logs) == ["rolled_back", "persistent"]

    skips = tmp_path / "skips"
    write_config(skips, steps=12, every=2)
    assert train(skips, "recovery.non_finite=skip", armed=ALWAYS_BAD)[0] == 0
    assert course(tmp_path / "run") == course(skips / "run")
