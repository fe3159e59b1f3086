"""Mistakes of users end in a message with the values that work and in the exit code of their kind, no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxtrain.checkpoint import directory
from nxtrain.cli import main as cli
from nxtrain.common.errors import CheckpointError, ConfigError, DataError, DivergedError
from nxtrain.config.show import dump
from tests.support.models import hf_model, plan
from tests.support.runs import course, run_plan, token_file


class Command:
    """`nxtrain train` on a small configuration of its own."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        data = {"source": "tokens", "path": str(token_file(folder / "rows.npy", num_rows=24))}
        self.run_dir, self._config = folder / "run", folder / "config.toml"
        self._patch, self._capture = patch, capture
        resolved = run_plan(self.run_dir, data, steps=4, backend={"name": "cpu"})
        self._config.write_text(dump(resolved.config), encoding="utf-8")

    def train(self, *overrides: str) -> tuple[int, str]:
        """Exit code and what it said on stderr; an exception would be a traceback, and fails the test."""
        self._patch.setattr(sys, "argv", ["nxtrain", "train", str(self._config), *overrides])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = self._capture.readouterr().err
        assert "Traceback" not in said
        return int(ended.value.code or 0), said


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return Command(tmp_path, monkeypatch, capsys)


SHAPE = "gqa2"


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    hf_model(plan(SHAPE)).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("model.norm.weight", None, "1 missing: model.norm.weight"),
        ("model.layers.7.mlp.weight", torch.zeros(2), "1 unknown to the model: model.layers.7.mlp.weight"),
        ("model.norm.weight", torch.zeros(7), "1 different: model.norm.weight is (7,) instead of (64,)"),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_hugging_face_tensors_that_do_not_fit_are_named(
    command: Command, hf_folder: Path, name: str, replacement: torch.Tensor | None, message: str
) -> None:
    file = hf_folder / "model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(file).items() if key != name}
    save_file(tensors | ({name: replacement} if replacement is not None else {}), file, {"format": "pt"})
    code, said = command.train(f"model.hf={hf_folder}", "model.init=hf")
    assert code == ConfigError.exit_code
    assert str(hf_folder) in said
    assert message in said


def test_a_loss_that_is_not_finite_ends_the_run_with_exit_code_6(command: Command) -> None:
    code, said = command.train("optim.lr=1e15", "optim.min_lr=1e15", "optim.clip=0.0", "checkpoint.every=1")
    assert code == DivergedError.exit_code == 6
    assert "error: step 2: loss=nan" in said
    assert "a lower optim.lr" in said
    assert [record["step"] for record in course(command.run_dir)] == [1]
    # The state that diverged is not among the checkpoints.
    assert [path.name for path in (command.run_dir / "checkpoints").glob("step-*")] == ["step-00000001"]


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
