"""A run whose files cannot be written ends in a message that names the file, with an exit code of the table."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nxtrain.common.errors import BackendError, CheckpointError
from tests.support.commands import in_process, write_config
from tests.support.run_folders import small_disk


@contextmanager
def frozen(path: Path) -> Iterator[None]:
    """A path that even root cannot write: it is mounted over itself, read-only."""
    subprocess.run(("mount", "--bind", str(path), str(path)), check=True)
    try:
        subprocess.run(("mount", "-o", "remount,bind,ro", str(path)), check=True)
        yield
    finally:
        subprocess.run(("umount", "--lazy", str(path)), check=True)


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """The configuration of a run that a start has already prepared."""
    with small_disk(tmp_path / "disk", 64 << 20) as folder:  # skips where nothing can be mounted
        path = write_config(folder, steps=1)
        text = folder / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
        code, _, said = in_process("train", path, *options(folder))
        assert code == 0, said
        yield path


def options(folder: Path) -> tuple[str, ...]:
    return ("data.source=text", f"data.path={folder}/text.txt", "checkpoint.every=0")


def test_a_folder_of_prepared_data_that_is_read_only_is_named(config: Path) -> None:
    folder = config.parent / "run" / "data"
    with frozen(folder):
        code, _, said = in_process("train", config, *options(config.parent))
    assert (code, f"{folder}/prepared-" in said, "Read-only file system" in said) == (
        BackendError.exit_code,
        True,
        True,
    )
    assert "give another path" in said


def test_a_configuration_of_a_run_that_is_read_only_is_named(config: Path) -> None:
    file = config.parent / "run" / "config.toml"
    with frozen(file):
        code, _, said = in_process("train", config, *options(config.parent), "metrics.log_every=2")
    assert code in {BackendError.exit_code, CheckpointError.exit_code}, said
    assert f"{file}" in said
    assert "give another path" in said or "run.dir" in said
