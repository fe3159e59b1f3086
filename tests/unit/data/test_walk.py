"""Nothing of a folder of text is left out without a word."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import DataError, StorageError
from nxtrain.data.corpora import text_files, walk
from tests.support.run_folders import as_nobody


def tree(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"words of {name}\n")
    return root


NAMES = ("a.txt", "open/b.txt", "open/deep/c.txt", "shut/d.txt", "shut/deep/e.txt")


@pytest.mark.parametrize("rights", [0o000, 0o100, 0o400])
@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [
        ("", True),
        ("/**", True),
        ("/**/*.txt", True),
        ("/*/*.txt", True),
        ("/*/d.txt", True),
        ("/shut/*", True),
        ("/*", False),
        ("/open/**/*.txt", False),
        ("/open", False),
    ],
)
def test_a_folder_that_cannot_be_entered_stops_the_start(rights: int, pattern: str, is_refused: bool) -> None:
    with as_nobody() as home:
        root = tree(home / "text", *NAMES)
        (root / "shut").chmod(rights)
        if not is_refused or (rights == 0o100 and pattern == "/*/d.txt"):  # which asks for no names of the folder
            assert text_files(f"{root}{pattern}").files
            return
        with pytest.raises(DataError) as refused:
            text_files(f"{root}{pattern}")
    assert str(refused.value).startswith(f"data.path={root}{pattern}: ")
    assert f"{root}/shut" in str(refused.value)
    assert "Permission denied" in str(refused.value)
    assert "training would miss their text" in str(refused.value)


def test_all_that_cannot_be_read_is_counted_and_some_is_named(tmp_path: Path) -> None:
    root = tree(tmp_path / "text", "a.txt")
    for number in range(15):
        (root / f"gone-{number:02}").symlink_to("nowhere")
    with pytest.raises(DataError) as refused:
        text_files(str(root))
    assert "15 of its folders and files cannot be read" in str(refused.value)
    assert f"\n    {root}/gone-11: No such file or directory\n    and 3 more" in str(refused.value)


def test_storage_that_fails_is_no_mistake_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path / "text", *NAMES)
    listed = os.listdir

    def fail(path: Any = ".") -> list[str]:
        if str(path).endswith("shut"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listed(path)

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(StorageError, match=r"1 of its folders .*\n.*/shut: Input/output error"):
        text_files(str(root))


def test_links_to_folders_are_named_and_hidden_entries_are_no_part(tmp_path: Path) -> None:
    root = tree(tmp_path / "text", "a.txt", "b/c.txt", ".hidden/d.txt", "b/.e.txt")
    (root / "link").symlink_to("b")
    (root / "f.txt").symlink_to("a.txt")
    result = walk(root)
    assert [str(path.relative_to(root)) for path in result.files] == ["a.txt", "b/c.txt", "f.txt"]
    assert result.skipped == {root / "link": "a link to a folder, which is not followed"}
    assert text_files(str(root)).skipped == result.skipped


def test_a_folder_that_is_itself_a_link_is_read(tmp_path: Path) -> None:
    tree(tmp_path / "text", "a.txt", "b/c.txt")
    (tmp_path / "link").symlink_to("text")
    assert len(text_files(str(tmp_path / "link")).files) == 2


def test_a_tree_deeper_than_the_stack_is_read(tmp_path: Path) -> None:
    before = Path.cwd()
    try:
        os.chdir(tmp_path)
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        Path("a.txt").write_text("deep")
        assert len(walk(tmp_path).files) == 1
    finally:
        os.chdir(before)
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # shutil.rmtree has a stack, too
