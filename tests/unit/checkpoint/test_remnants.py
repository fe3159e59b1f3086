"""Names that show that checkpoints are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.rewinds import FILE


@pytest.mark.parametrize(
    ("name", "is_remnant"),
    [
        ("meta.json", True),
        ("manifest.json", True),
        ("rank-00003.safetensors", True),
        ("step-00000004.bak", True),
        ("step-4", True),
        ("step-00000004.old-0a1b2c3d", True),
        ("step-00000004.tmp-0a1b2c3d", False),
        ("step-00000004.corrupt", False),
        ("step-00000004.corrupt-1", False),
        ("step-00000004.abandoned", False),
        ("step-00000004.corrupt.abandoned", False),
        ("step-00000004", False),  # listed as an incomplete checkpoint
        (FILE, False),
        (".disk-0a1b2c3d-0", False),
    ],
)
def test_a_name_that_no_write_leaves_is_a_remnant(tmp_path: Path, name: str, is_remnant: bool) -> None:
    (tmp_path / name).touch()
    assert directory.remnants(tmp_path) == ([name] if is_remnant else [])


@pytest.mark.parametrize("content", ["step-00000004\n", "", "rubbish", "../../etc", "*"])
def test_the_record_of_a_checkpoint_that_is_gone_is_a_remnant(tmp_path: Path, content: str) -> None:
    (tmp_path / directory.LATEST).write_text(content)
    assert directory.remnants(tmp_path) == [directory.LATEST]
    directory.step_path(tmp_path, 4).with_suffix(".abandoned").mkdir()
    assert directory.remnants(tmp_path) == ([] if content.startswith("step-") else [directory.LATEST])


@pytest.mark.parametrize("kept", [0, 2, 4])
def test_the_record_of_the_newest_follows_a_rewind(tmp_path: Path, kept: int) -> None:
    for step in (2, 4):
        path = directory.step_path(tmp_path, step)
        path.mkdir()
        (path / directory.META).touch()
        directory.point_to(path)
    directory.abandon(tmp_path, kept)
    latest = tmp_path / directory.LATEST
    assert (latest.read_text().strip() if latest.exists() else "") == (f"step-0000000{kept}" if kept else "")
    assert directory.remnants(tmp_path) == []
