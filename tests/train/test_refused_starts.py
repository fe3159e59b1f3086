"""A start that is refused changes nothing of the run that it was refused for."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.checkpoint import directory
from nxtrain.errors import CheckpointError, DataError
from tests.train.test_bad_input import Command


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return Command(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("overrides", "ends_with"),
    [
        (["run.seed=9"], CheckpointError.exit_code),
        (["model.config.hidden_size=128"], CheckpointError.exit_code),
        (["train.global_batch=2"], CheckpointError.exit_code),
        (["precision.params=bf16", "precision.update=fp32_master"], CheckpointError.exit_code),
        (["data.path=/nowhere.npy"], DataError.exit_code),
        (["train.seq_len=17"], DataError.exit_code),
        (["checkpoint.resume=/nowhere"], CheckpointError.exit_code),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_the_configuration_of_a_run_is_that_of_the_start_that_it_goes_on_from(
    command: Command, overrides: list[str], ends_with: int
) -> None:
    """`convert nxtrain-to-nxd RUN` takes the optimizer's settings from there."""
    assert command.train("optim.lr=0.002", "checkpoint.every=2")[0] == 0
    file = command.run_dir / "config.toml"
    before = file.read_bytes()
    code, said = command.train("optim.lr=0.009", *overrides)
    assert code == ends_with, said
    assert file.read_bytes() == before
    assert b"lr = 0.002" in before
    code, said = command.train("optim.lr=0.009", "train.steps=6", "checkpoint.every=2")
    assert code == 0, said
    assert b"lr = 0.009" in file.read_bytes()
    assert directory.newest(command.run_dir / "checkpoints") == command.run_dir / "checkpoints/step-00000006"


def test_a_first_start_that_is_refused_has_no_configuration(command: Command) -> None:
    code, said = command.train("data.path=/nowhere.npy")
    assert code == DataError.exit_code, said
    assert not (command.run_dir / "config.toml").exists()
