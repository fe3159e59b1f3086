"""A signal stops all ranks after the same step, which is saved, and no step is lost."""

from __future__ import annotations

import json
import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from nxtrain.checkpoint import directory
from nxtrain.common.errors import CrashLoopError, StoppedBySignal
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from tests.support.command_ranks import Ranks, until, write_config
from tests.support.runs import course, saved_steps

STEPS = 24
STOPPED = StoppedBySignal.exit_code
SLOW = "sleep@*:3:data:0.2"
"""So that signals find the run under way."""
SLOW_SAVE = "sleep@*:*:ckpt_rename:{}"


@pytest.fixture(scope="module")
def uninterrupted(started_by: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_config(folder, steps=STEPS, every=1000)
    with Ranks(started_by, folder) as ranks:
        assert ranks.ended() == {0: 0, 1: 0}, ranks.said()
    return course(folder / "run")


def is_saving(folder: Path) -> bool:
    return any((folder / "run" / CHECKPOINTS_DIR).glob("*.tmp-*"))


def finish(started_by: ForkServerContext, folder: Path) -> Ranks:
    """Start a run again and let it come to its end."""
    with Ranks(started_by, folder) as ranks:
        assert ranks.ended() == {0: 0, 1: 0}, ranks.said()
    return ranks


@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGTERM, (0, 1)), (signal.SIGTERM, (1,)), (signal.SIGUSR1, (0,)), (signal.SIGINT, (0, 1))],
)
def test_no_step_is_lost(
    started_by: ForkServerContext,
    tmp_path: Path,
    uninterrupted: list[dict[str, Any]],
    number: signal.Signals,
    to: tuple[int, ...],
) -> None:
    write_config(tmp_path, steps=STEPS, every=1000)
    with Ranks(started_by, tmp_path, SLOW) as ranks:
        ranks.await_steps(5)
        ranks.send(number, *to)
        assert ranks.ended() == {0: STOPPED, 1: STOPPED}, ranks.said()
    step = course(tmp_path / "run")[-1]["step"]
    assert 5 <= step < STEPS
    assert [path.name for path in (tmp_path / "run" / CHECKPOINTS_DIR).glob("step-*")] == [f"step-{step:08d}"]
    said = ranks.said()
    assert f"{number.name} at rank " in said[0]
    assert f"\nstopped after step {step}, whose checkpoint is saved" in said[0]
    assert "stopped" not in said[1], "once is enough"
    assert "Traceback" not in said[0] + said[1]
    assert f"continues after step {step}\n" in finish(started_by, tmp_path).said()[0]
    assert course(tmp_path / "run") == uninterrupted


def test_a_signal_during_a_save_waits_for_it_and_for_that_of_the_last_step(
    started_by: ForkServerContext, tmp_path: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    write_config(tmp_path, steps=STEPS, every=7)
    with Ranks(started_by, tmp_path, SLOW, SLOW_SAVE.format(1.5)) as ranks:
        until(lambda: is_saving(tmp_path), 120.0, ranks.said)
        ranks.send(signal.SIGTERM, 0, 1)
        assert ranks.ended() == {0: STOPPED, 1: STOPPED}, ranks.said()
    # Training went on while step 7 was written, and stopped at a later step, which was saved after it.
    saved = saved_steps(tmp_path / "run")
    assert saved[0] == 7
    assert saved[-1] == course(tmp_path / "run")[-1]["step"] < STEPS
    assert len(saved) <= 2
    finish(started_by, tmp_path)
    assert course(tmp_path / "run") == uninterrupted


@pytest.mark.alone
def test_a_second_signal_ends_at_once_and_leaves_what_is_valid(
    started_by: ForkServerContext, tmp_path: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    write_config(tmp_path, steps=STEPS, every=7)
    with Ranks(started_by, tmp_path, SLOW, SLOW_SAVE.format(3)) as ranks:
        until(lambda: is_saving(tmp_path), 120.0, ranks.said)
        ranks.send(signal.SIGTERM, 0, 1)
        time.sleep(1.2)
        sent = time.monotonic()
        ranks.send(signal.SIGTERM, 0, 1)
        assert ranks.ended() == {0: 128 + signal.SIGTERM, 1: 128 + signal.SIGTERM}, ranks.said()
        assert time.monotonic() - sent < 1.0
    assert directory.newest(tmp_path / "run" / CHECKPOINTS_DIR) is None
    finish(started_by, tmp_path)
    assert course(tmp_path / "run") == uninterrupted


def test_what_fails_at_one_step_again_and_again_is_started_no_more(
    started_by: ForkServerContext, tmp_path: Path
) -> None:
    write_config(tmp_path, steps=STEPS, every=3)
    for _ in range(3):
        with Ranks(started_by, tmp_path, "raise!@1:8:data") as ranks:
            assert set(ranks.ended().values()) == {1}, ranks.said()
    with Ranks(started_by, tmp_path) as ranks:
        assert ranks.ended(0) == {0: CrashLoopError.exit_code}
        said = ranks.said()[0]
    assert "error: rank 0: the last 3 starts of this run all failed after step 7; the last error was: " in said
    assert "rank 1 is gone" in said or "injected failure" in said, said
    ends = [json.loads(line) for line in (tmp_path / "run/logs/starts.jsonl").read_text().splitlines()]
    assert [line["event"] for line in ends] == ["start", "end"] * 3
    path = tmp_path / "config.toml"
    path.write_text(path.read_text() + "[optim]\nlr = 1e-4\n", encoding="utf-8")
    finish(started_by, tmp_path)
