"""Refusal of a launch on a machine without the devices of the run, before any rank starts, and the ways around it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nxtrain import backends
from nxtrain.backends import device_support
from nxtrain.backends.base import Support
from nxtrain.backends.neuron import sdk, torchneuron
from nxtrain.cli import main as cli
from nxtrain.common.errors import BackendError
from nxtrain.launch.local import launch
from tests.support import ROOT, TINY
from tests.unit.launch.conftest import Program

NONE = Support(False, "no device in this test\n    buy one")
OVERRIDES = {
    "neuron": ["backend.name=neuron", "cluster.instance=trn1.32xlarge"],
    "neuron-native": ["backend.name=neuron-native", "cluster.instance=trn2.48xlarge"],
    "cuda": ["backend.name=cuda"],
}


@pytest.fixture
def without_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: list[Program]) -> list[Program]:
    """A machine that has none; the programs that would be started."""
    monkeypatch.setattr(sdk, "support", lambda: NONE)
    monkeypatch.setattr(torchneuron, "support", lambda *, devices=True: NONE)
    monkeypatch.setattr(backends, "support", lambda name: NONE)
    monkeypatch.setattr(backends, "GPU_DEVICES", tmp_path)
    return started


@pytest.mark.parametrize("backend", OVERRIDES)
def test_no_rank_starts_without_the_devices_of_its_run(
    without_devices: list[Program], capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    with pytest.raises(
        BackendError, match=f"backend.name={backend} cannot run here: no device in this test"
    ) as refused:
        launch(TINY, OVERRIDES[backend], None, dry_run=False)
    assert (refused.value.exit_code, without_devices) == (5, [])
    assert capsys.readouterr().out == "", "the reason stands alone, without the environment of the ranks"
    launch(TINY, OVERRIDES[backend], None, dry_run=True)
    assert "nxtrain train" in capsys.readouterr().out


def command_line(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["nxtrain", "launch", str(TINY), *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_each_visible_gpu_gets_a_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(backends, "support", lambda name: Support(name == "cuda", "3 GPUs"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    given = ("--nproc", "gpu", "--dry-run", "parallel.dp=0", "train.global_batch=6", "train.micro_batch=1")
    assert command_line(monkeypatch, *given) == 0
    assert "--nproc-per-node=3" in capsys.readouterr().out
    assert command_line(monkeypatch, *given, "parallel.tp=2") == 2
    assert "does not divide the world of 3 ranks" in capsys.readouterr().err


def test_without_a_gpu_and_for_other_machines_a_number_is_asked_for(
    without_devices: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(monkeypatch, "--nproc", "gpu", "--dry-run") == 5
    assert "--nproc gpu finds no GPU: no device in this test" in capsys.readouterr().err
    assert command_line(monkeypatch, "--nproc", "gpu", "--target", "slurm", "--dry-run") == 2
    assert "--nproc gpu counts GPUs of this machine, not of --target slurm" in capsys.readouterr().err
    assert command_line(monkeypatch, "--nproc", "gp", "--dry-run") == 2
    assert "give a number, or gpu" in " ".join(capsys.readouterr().err.replace("\u2502", " ").split())


@pytest.mark.parametrize("backend", ["cpu", "xla", "auto"])
def test_a_run_that_needs_no_device_starts_anywhere(
    without_devices: list[Program], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    launch(TINY, [f"backend.name={backend}"], None, dry_run=False)
    assert len(without_devices) == 1


@pytest.mark.parametrize("name", ["nvidia0", "nvidia17", "dxg"])
def test_a_machine_that_shows_a_gpu_starts_its_ranks_without_an_import_of_torch(
    without_devices: list[Program], tmp_path: Path, name: str
) -> None:
    (tmp_path / "nvidiactl").touch()
    assert not device_support("cuda", {}).ok, "the driver's control file is not a GPU"
    (tmp_path / name).touch()
    assert device_support("cuda", {}).ok
    assert not without_devices


@pytest.mark.parametrize("backend", ["neuron", "neuron-native"])
def test_the_command_ends_at_once_with_the_true_reason(backend: str) -> None:
    argv = [sys.executable, "-m", "nxtrain", "launch", str(TINY), *OVERRIDES[backend]]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (5, "")
    assert f"error: backend.name={backend} cannot run here: " in done.stderr
    assert "no Neuron device in /dev" in done.stderr
    assert "rank" not in done.stderr
