"""What counts as a checkpoint, which is the newest, and what survives a commit or a deletion."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.checkpoint import layout
from nxtrain.errors import CheckpointError


def make(path: Path, *, complete: bool = True) -> Path:
    path.mkdir(parents=True)
    if complete:
        (path / layout.META).write_text("{}")
    return path


def test_checkpoints_are_listed_by_step_and_only_complete_ones(tmp_path: Path) -> None:
    steps = (100_000_000, 20_000_000, 3)  # the first has nine digits: by name it would come before the second
    for step in steps:
        make(layout.step_path(tmp_path, step))
    make(layout.step_path(tmp_path, 40), complete=False)
    make(tmp_path / "step-00000050.tmp")
    make(tmp_path / "best")
    assert layout.list_checkpoints(tmp_path) == [
        layout.step_path(tmp_path, step) for step in (3, 20_000_000, 100_000_000)
    ]
    assert layout.newest(tmp_path) == layout.step_path(tmp_path, 100_000_000)


def test_a_folder_that_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    assert layout.newest(tmp_path / "none") is None


def test_a_checkpoint_is_found_from_itself_its_folder_and_its_run(tmp_path: Path) -> None:
    make(layout.step_path(tmp_path / "checkpoints", 10))
    wanted = make(layout.step_path(tmp_path / "checkpoints", 20))
    assert layout.resolve(wanted) == layout.resolve(tmp_path / "checkpoints") == layout.resolve(tmp_path) == wanted


def test_a_converted_checkpoint_may_have_any_name(tmp_path: Path) -> None:
    assert layout.resolve(make(tmp_path / "llama")) == tmp_path / "llama"


def test_no_checkpoint_is_an_error_that_says_what_was_looked_for(tmp_path: Path) -> None:
    make(layout.step_path(tmp_path / "checkpoints", 10), complete=False)
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint.*meta\.json"):
        layout.resolve(tmp_path)


@pytest.mark.parametrize(("keep", "gone"), [(0, []), (1, [1, 2]), (2, [1]), (3, []), (5, [])])
def test_the_oldest_make_room(keep: int, gone: list[int]) -> None:
    assert list(layout.doomed([1, 2, 3], keep)) == gone


def test_pruning_leaves_no_trace_of_what_it_deletes(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make(layout.step_path(tmp_path, step))
    layout.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


def test_publishing_replaces_and_preparing_removes_leftovers(tmp_path: Path) -> None:
    path = make(layout.step_path(tmp_path, 10))
    (path / "stale").touch()
    make(tmp_path / "step-00000005.old")
    make(tmp_path / "step-00000007.tmp")
    make(tmp_path / "mine.old")
    make(layout.staging(path))
    layout.prepare(path)
    assert list(layout.staging(path).iterdir()) == []
    (layout.staging(path) / "fresh").touch()
    layout.publish(path)
    assert [file.name for file in path.iterdir()] == ["fresh"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine.old", "step-00000010"]
