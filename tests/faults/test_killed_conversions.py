"""A conversion that is killed anywhere leaves nothing that looks finished, and does its work at the next start."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nxtrain.checkpoint import directory
from tests.support.commands import command, train, trained, write_config
from tests.support.runs import course

DIRECTIONS = ("nxtrain-to-hf", "hf-to-nxtrain", "nxtrain-to-nxd", "nxd-to-nxtrain")


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and what each conversion makes, named by its direction; each way back begins with the way there."""
    folder = tmp_path_factory.mktemp("outputs")
    write_config(folder, steps=4)
    trained(folder)
    for direction in DIRECTIONS:
        code, output = convert(folder, direction, folder / direction)
        assert code == 0, output
    return folder


def convert(outputs: Path, direction: str, target: Path, first: Callable[[], object] | None = None) -> tuple[int, str]:
    source = {"hf-to-nxtrain": "nxtrain-to-hf", "nxd-to-nxtrain": "nxtrain-to-nxd"}.get(direction, "run")
    return command(outputs, "convert", direction, outputs / source, target, first=first)


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_at_sync(number: int) -> None:
    sync, count = os.fsync, 0

    def counted(fd: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            _killed()
        sync(fd)

    os.fsync = counted


def _kill_before_publishing() -> None:
    directory.publish = lambda staged, path: _killed()


def _kill_between_renames() -> None:
    aside = directory._set_aside

    def and_killed(path: Path, kind: str) -> Path:
        aside(path, kind)
        _killed()
        return path

    directory._set_aside = and_killed


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_conversion_that_was_killed_does_its_work_at_the_next_start(
    tmp_path: Path, outputs: Path, direction: str
) -> None:
    target = tmp_path / "to" / direction

    def kill(first: Callable[[], object]) -> None:
        code, output = convert(outputs, direction, target, first)
        assert code == -signal.SIGKILL, output

    def finish() -> None:
        code, output = convert(outputs, direction, target)
        assert code == 0, output
        assert digests(target) == digests(outputs / direction)
        assert [path.name for path in target.parent.iterdir()] == [direction]
        assert not [path for path in target.rglob("*") if ".tmp-" in path.name or ".old-" in path.name]

    for first in (partial(_kill_at_sync, 1), partial(_kill_at_sync, 2), _kill_before_publishing):
        kill(first)
        assert not [path for path in target.parent.rglob("*") if path.name == "step_4"], "a tag that looks finished"
        assert direction == "nxtrain-to-nxd" or not target.exists()
    finish()
    # Now there is something to replace.
    kill(partial(_kill_at_sync, 2))
    assert digests(outputs / direction).items() <= digests(target).items()
    kill(_kill_between_renames)
    finish()


def test_a_run_that_is_killed_while_it_loads_goes_on_at_the_next_start(tmp_path: Path, outputs: Path) -> None:
    write_config(tmp_path / "straight", steps=6)
    write_config(tmp_path, steps=6)
    shutil.copytree(outputs / "run", tmp_path / "run")
    before = digests(tmp_path / "run/checkpoints")
    longer = ("train.steps=6", "optim.decay_steps=4")
    armed = "kill@0:0:load"
    code, output = train(tmp_path, *longer, armed=armed)
    assert code == -signal.SIGKILL, output
    assert digests(tmp_path / "run/checkpoints") == before
    output = trained(tmp_path, *longer, armed=armed)
    assert "continues after step 4\n" in output
    trained(tmp_path / "straight", *longer)
    assert course(tmp_path / "run") == course(tmp_path / "straight/run")
