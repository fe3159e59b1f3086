"""A run that needs a package which is not installed names it, and how to get it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nxtrain.cli import main as cli
from nxtrain.common.errors import BackendError
from tests.support.commands import write_config


def train_without(
    names: tuple[str, ...],
    config: Path,
    *overrides: str,
    patch: pytest.MonkeyPatch,
    capture: pytest.CaptureFixture[str],
) -> str:
    """Output of a run that fails for want of packages."""
    for name in [result for result in sys.modules if result.partition(".")[0] in names]:
        patch.delitem(sys.modules, name)
    for name in names:
        patch.setitem(sys.modules, name, None)
    patch.delitem(sys.modules, "nxtrain.metrics.tensorboard", raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        patch.delenv(name, raising=False)
    patch.setattr(sys, "argv", ["nxtrain", "train", str(config), *overrides])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capture.readouterr().err
    assert (ended.value.code, "Traceback" in said) == (BackendError.exit_code, False), said
    return said


def test_event_files_without_tensorboard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wanted = "metrics.tensorboard=true"
    said = train_without(("tensorboard",), write_config(tmp_path), wanted, patch=monkeypatch, capture=capsys)
    assert "error: tensorboard cannot be imported" in said
    assert "pip install 'tensorboard" in said
    assert "metrics.tensorboard=false" in said
