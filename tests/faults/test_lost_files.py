"""Files of checkpoints that a copy cut short or a cleaner removed: a run goes on from what is whole, or ends with 4."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nxtrain.checkpoint import directory
from nxtrain.common.errors import BackendError, CheckpointError
from nxtrain.common.run_folder import CHECKPOINTS_DIR, METRICS_FILE
from tests.support import commands, runs

SHARD = "rank-00000.safetensors"
STEPS = (2, 4, 6)
OVERRIDES = ("checkpoint.every=2", "checkpoint.keep=99", "checkpoint.async=false")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    commands.write_config(folder, steps=6)
    code, _, err = train(folder)
    assert code == 0, err
    return folder


def train(folder: Path, *overrides: str) -> tuple[int, str, str]:
    return commands.in_process("train", folder / runs.FILE, *OVERRIDES, *overrides)


def copied(finished: Path, to: Path) -> Path:
    """Copy of the finished run, which has the same data; returns the folder of the checkpoints."""
    shutil.copytree(finished / "run", to / "run")
    commands.write_config(to, steps=6)
    return to / "run" / CHECKPOINTS_DIR


def removes(name: str) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / name).unlink()


def truncates(name: str) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / name).write_bytes(b"")


def cuts(name: str) -> Callable[[Path], None]:
    def cut(checkpoint: Path) -> None:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[: len(content) // 2])

    return cut


def empties(checkpoint: Path) -> None:
    for file in checkpoint.iterdir():
        file.unlink()


def removes_small_files(checkpoint: Path) -> None:
    for file in checkpoint.iterdir():
        if file.name != SHARD:
            file.unlink()


def unlinks(checkpoint: Path) -> None:
    """Leave a link to a folder that is gone, as of a disk that is not mounted."""
    shutil.rmtree(checkpoint)
    checkpoint.symlink_to("/nowhere/at/all")


def renames(checkpoint: Path) -> None:
    checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.bak"))


FILES = (directory.META, directory.MANIFEST, SHARD)
DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"no {name}": removes(name) for name in FILES},
    **{f"empty {name}": truncates(name) for name in FILES},
    **{f"half of {name}": cuts(name) for name in FILES},
    "emptied": empties,
    "shards alone": removes_small_files,
    "a broken link": unlinks,
    "another name": renames,
    "gone": shutil.rmtree,
}


def tensor_files(checkpoints: Path) -> dict[str, Path]:
    """Files of tensors that are not empty, by their sha256."""
    files = [path for path in checkpoints.rglob("*.safetensors") if path.stat().st_size]
    return {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in files}


def assert_nothing_is_lost(folder: Path, whole: set[int], overrides: tuple[str, ...] = ()) -> None:
    """Start a damaged run again: it goes on from the newest whole checkpoint, or changes nothing that counts."""
    checkpoints, metrics = folder / "run" / CHECKPOINTS_DIR, folder / "run" / METRICS_FILE
    before, record = tensor_files(checkpoints), metrics.read_bytes()
    code, _, err = train(folder, "train.steps=7", *overrides)
    after = tensor_files(checkpoints)
    assert before.keys() <= after.keys(), f"written over: {[before[key].name for key in before.keys() - after.keys()]}"
    if whole:
        assert code == 0, err
        assert f"continues after step {max(whole)}" in err
        for step in range(max(whole) + 2, max(STEPS) + 1, 2):
            assert f"step-{step:08d}" in err or not [*checkpoints.glob(f"step-{step:08d}.corrupt*")], err
    else:
        assert code == CheckpointError.exit_code, err
        assert "checkpoint.resume=never" in err
        assert metrics.read_bytes() == record


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_loss_in_all_checkpoints_is_no_start_from_scratch(finished: Path, tmp_path: Path, damage: str) -> None:
    checkpoints = copied(finished, tmp_path)
    for step in STEPS:
        DAMAGES[damage](directory.step_path(checkpoints, step))
    assert_nothing_is_lost(tmp_path, set())
    assert_nothing_is_lost(tmp_path, set())


@pytest.mark.parametrize("seed", range(8))
def test_a_drawn_loss_costs_only_what_is_lost(finished: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    checkpoints = copied(finished, tmp_path)
    damages = {step: draw.choice([*DAMAGES, *("none",) * 5]) for step in STEPS}
    for step, damage in damages.items():
        if damage != "none":
            DAMAGES[damage](directory.step_path(checkpoints, step))
    if draw.random() < 0.5:
        (checkpoints / directory.LATEST).unlink()
    assert_nothing_is_lost(tmp_path, {step for step, damage in damages.items() if damage == "none"})


@pytest.mark.parametrize("damage", ["no meta.json", "emptied", "a broken link", "another name"])
def test_a_start_from_scratch_on_request_keeps_what_is_left(finished: Path, tmp_path: Path, damage: str) -> None:
    checkpoints = copied(finished, tmp_path)
    for step in STEPS:
        DAMAGES[damage](directory.step_path(checkpoints, step))
    before = tensor_files(checkpoints)
    code, _, err = train(tmp_path, "checkpoint.resume=never")
    assert code == 0, err
    assert "starts from scratch" in err
    after = tensor_files(checkpoints)
    assert before.keys() <= after.keys()
    assert runs.saved_steps(tmp_path / "run") == [*STEPS]
    assert (checkpoints / directory.LATEST).read_text() == "step-00000006\n"
    assert not directory.remnants(checkpoints) or damage == "another name"


def test_a_folder_of_checkpoints_that_is_a_broken_link_is_no_empty_one(finished: Path, tmp_path: Path) -> None:
    checkpoints = copied(finished, tmp_path)
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to("/nowhere/at/all")
    record = (tmp_path / "run" / METRICS_FILE).read_bytes()
    code, _, err = train(tmp_path)
    assert code == BackendError.exit_code, err
    assert (tmp_path / "run" / METRICS_FILE).read_bytes() == record
