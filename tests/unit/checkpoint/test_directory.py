"""Checkpoints of a folder, the newest of them, and the state after an interrupted commit or deletion."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.rewinds import FILE
from nxtrain.common.errors import CheckpointError


def make(path: Path, *, complete: bool = True) -> Path:
    path.mkdir(parents=True)
    if complete:
        (path / directory.META).write_text("{}")
    return path


def test_checkpoints_are_listed_by_step_and_only_complete_ones(tmp_path: Path) -> None:
    steps = (100_000_000, 20_000_000, 3)  # the first has nine digits: by name it would come before the second
    for step in steps:
        make(directory.step_path(tmp_path, step))
    make(directory.step_path(tmp_path, 40), complete=False)
    make(tmp_path / "step-00000050.tmp-0a1b")
    make(tmp_path / "best")
    assert directory.list_checkpoints(tmp_path) == [
        directory.step_path(tmp_path, step) for step in (3, 20_000_000, 100_000_000)
    ]
    assert directory.newest(tmp_path) == directory.step_path(tmp_path, 100_000_000)


def test_a_folder_that_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    assert directory.newest(tmp_path / "none") is None


def test_a_checkpoint_is_found_from_itself_its_folder_and_its_run(tmp_path: Path) -> None:
    make(directory.step_path(tmp_path / "checkpoints", 10))
    wanted = make(directory.step_path(tmp_path / "checkpoints", 20))
    assert (
        directory.find_checkpoint(wanted)
        == directory.find_checkpoint(tmp_path / "checkpoints")
        == directory.find_checkpoint(tmp_path)
        == wanted
    )


def test_a_converted_checkpoint_may_have_any_name(tmp_path: Path) -> None:
    assert directory.find_checkpoint(make(tmp_path / "llama")) == tmp_path / "llama"


def test_no_checkpoint_is_an_error_that_says_what_was_looked_for(tmp_path: Path) -> None:
    make(directory.step_path(tmp_path / "checkpoints", 10), complete=False)
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint.*meta\.json"):
        directory.find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("keep", "every", "verified", "stay"),
    [
        (0, 0, (), (10, 20, 30, 40)),
        (1, 0, (), (40,)),
        (1, 0, (40,), (40,)),
        (1, 0, (20, 30, 40), (30, 40)),
        (1, 0, (10, 20), (10, 20, 40)),
        (2, 0, (10, 20, 30, 40), (30, 40)),
        (3, 0, (10,), (10, 20, 30, 40)),
        (2, 20, (), (20, 30, 40)),
        (1, 10, (), (10, 20, 30, 40)),
        (5, 0, (), (10, 20, 30, 40)),
    ],
)
def test_the_oldest_make_room_but_not_the_last_two_that_verified(
    tmp_path: Path, keep: int, every: int, verified: tuple[int, ...], stay: tuple[int, ...]
) -> None:
    for step in (10, 20, 30, 40):
        path = make(directory.step_path(tmp_path, step))
        if step in verified:
            directory.mark_verified(path)
    directory.prune(tmp_path, directory.Retention(keep, every))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in stay]


def test_what_is_put_aside_is_no_checkpoint_and_keeps_its_name(tmp_path: Path) -> None:
    for number in ("", "-1", "-2"):
        aside = directory.quarantine(make(directory.step_path(tmp_path, 10)))
        assert aside == tmp_path / f"step-00000010.corrupt{number}"
    assert directory.list_checkpoints(tmp_path) == []
    assert len(directory.quarantined(tmp_path)) == 3


def test_the_newest_is_named_for_people_and_nothing_relies_on_it(tmp_path: Path) -> None:
    for step in (10, 20):
        directory.point_to(make(directory.step_path(tmp_path, step)))
    assert (tmp_path / directory.LATEST).read_text() == "step-00000020\n"
    (tmp_path / directory.LATEST).write_text("step-00000010\n")
    assert directory.newest(tmp_path) == directory.step_path(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010", "step-00000020"]


def test_publishing_replaces_and_preparing_removes_leftovers(tmp_path: Path) -> None:
    path = make(directory.step_path(tmp_path, 10))
    (path / "stale").touch()
    make(directory.step_path(tmp_path, 5))
    make(tmp_path / "step-00000005.old-3c4d")
    make(tmp_path / "step-00000007.tmp-12ab")
    make(tmp_path / "mine.old")
    abandoned = directory.prepare(path)
    staged = directory.prepare(path)
    assert abandoned != staged
    assert not abandoned.exists()
    assert list(staged.iterdir()) == []
    (staged / "fresh").touch()
    directory.publish(staged, path)
    assert [file.name for file in path.iterdir()] == ["fresh"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [*("mine.old", "step-00000005", "step-00000010")]


def test_a_checkpoint_that_was_moved_and_linked_leaves_no_link(tmp_path: Path) -> None:
    """The link makes room; its target on another disk is the user's."""
    checkpoints, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for step in (1, 2, 3, 4):
        make(directory.step_path(checkpoints, step))
        directory.mark_verified(directory.step_path(checkpoints, step))
    moved = directory.step_path(checkpoints, 1).rename(elsewhere)
    directory.step_path(checkpoints, 1).symlink_to(moved)
    directory.prune(checkpoints, directory.Retention(keep=2))
    assert {path.name for path in checkpoints.iterdir()} == {"step-00000003", "step-00000004"}
    assert directory.is_checkpoint(moved)
    path = directory.step_path(checkpoints, 5)
    path.symlink_to(moved)
    directory.publish(make(directory.draft_of(path)), path)
    assert not path.is_symlink()
    assert {path.name for path in checkpoints.iterdir()} == {"step-00000003", "step-00000004", "step-00000005"}


def test_what_a_kill_left_between_two_renames_gets_its_name_back(tmp_path: Path) -> None:
    make(tmp_path / "step-00000005.old-3c4d")
    make(tmp_path / "step-00000005.tmp-5e6f")
    make(tmp_path / "llama-3.2.old-1a2b")
    directory.clear(tmp_path)
    assert directory.list_checkpoints(tmp_path) == [directory.step_path(tmp_path, 5)]
    directory.clear(tmp_path, "llama-3.2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama-3.2", "step-00000005"]


def test_what_cannot_be_deleted_keeps_nobody_from_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "step-00000005.tmp-5e6f")
    monkeypatch.setattr(os, "rmdir", refuse)
    staged = directory.prepare(directory.step_path(tmp_path, 10))
    (staged / directory.META).touch()
    directory.publish(staged, directory.step_path(tmp_path, 10))
    assert directory.newest(tmp_path) == directory.step_path(tmp_path, 10)


def refuse(*args: object, **kwargs: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_a_run_that_goes_back_keeps_what_it_leaves_under_another_name(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make(directory.step_path(tmp_path, step))
    directory.abandon(tmp_path, 30, damaged=True)
    assert not (tmp_path / directory.LATEST).exists()  # nothing was renamed
    directory.abandon(tmp_path, 10)
    assert directory.list_checkpoints(tmp_path) == [directory.step_path(tmp_path, 10)]
    assert {path.name for path in tmp_path.glob("*.abandoned")} == {
        *("step-00000020.abandoned", "step-00000030.abandoned")
    }


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
