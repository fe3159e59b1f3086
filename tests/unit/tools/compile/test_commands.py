"""`nxtrain cache` as people and scripts meet it: tables, JSON, messages and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from nxtrain.cli import main as cli
from nxtrain.tools.compile.entries import NEFF
from tests.support.caches import COMPILER, add_done, add_failed, add_locked, add_pending, key


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache with one entry of each state that needs no owner; its stale lock is a week old."""
    root = tmp_path / "cache"
    add_done(root, key(1))
    add_failed(root, key(2))
    stale = add_locked(root, key(3))
    for path in stale.iterdir():
        os.utime(path, (path.stat().st_mtime - 7 * 86400,) * 2)
    add_pending(root, key(4))
    return root


def main(monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["nxtrain", "cache", *map(str, args)])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    return int(raised.value.code or 0)


def test_ls_shows_every_entry_its_state_and_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    assert main(monkeypatch, "ls", root) == 0
    lines = capsys.readouterr().out.splitlines()
    for number, state in enumerate(("done", "failed", "stale", "pending"), start=1):
        assert [line.split()[:3] for line in lines if key(number).module in line] == [
            [state, COMPILER.removeprefix("neuronxcc-"), key(number).module]
        ]
    assert lines[-2].startswith("1 done, 1 failed, 1 stale, 1 pending; ")
    assert lines[-1] == f"to mend: nxtrain cache clean {root} --failed --stale"


def test_ls_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert main(monkeypatch, "ls", root, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["folder"] == str(root)
    assert shown["counts"] == {"done": 1, "failed": 1, "locked": 0, "stale": 1, "pending": 1}
    assert [entry["state"] for entry in shown["entries"]] == ["done", "failed", "stale", "pending"]
    assert shown["entries"][1]["detail"] == "Failed compilation with exit code 70"
    assert shown["bytes"] == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_clean_mends_everything_by_default_and_only_what_is_asked_for_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    assert main(monkeypatch, "clean", root, "--stale") == 0
    assert capsys.readouterr().out.splitlines()[:-1] == [f"{key(3)}  lock broken"]
    assert main(monkeypatch, "clean", root) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == [f"{key(2)}  into quarantine"]
    assert main(monkeypatch, "clean", root, "--max-gib", "0") == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert main(monkeypatch, "ls", root) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "empty; 0 B"


def test_verify_ends_with_5_when_something_was_damaged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    assert main(monkeypatch, "verify", root) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 as they were sealed, 1 hashed for the first time")
    (root / COMPILER / key(1).module / NEFF).write_bytes(b"torn")
    assert main(monkeypatch, "verify", root) == 5
    assert "1 of 1 entries of" in capsys.readouterr().err
    assert main(monkeypatch, "verify", root) == 0


def test_sync_copies_once_and_reports_what_it_could_not_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    for words in ("1 copied (", "0 copied (0 B), 1 there already"):
        assert main(monkeypatch, "sync", root, tmp_path / "shared") == 0
        assert capsys.readouterr().out.startswith(words)
    (tmp_path / "shared" / COMPILER / key(1).module / NEFF).write_bytes(b"torn")
    assert main(monkeypatch, "sync", tmp_path / "shared", tmp_path / "other") == 5
    printed = capsys.readouterr()
    assert printed.out.startswith("0 copied (0 B), 0 there already")
    assert f"    {key(1)}: damaged: model.neff has 4 bytes" in printed.err


def test_a_configuration_file_stands_for_its_cache_dir(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[compile]\ncache_dir = "{root}"\n', encoding="utf-8")
    assert main(monkeypatch, "ls", config, "--json") == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(root)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["ls", "absent"], 2, "absent is no folder"),
        (["ls"], 2, "compile_cache"),
        (["verify", "s3://bucket/prefix"], 2, "is a bucket; this command works on a folder"),
        (["sync", "absent", "other"], 2, "absent is no folder"),
        (["ls", "absent.toml"], 2, "cannot read absent.toml"),
    ],
)
def test_a_place_that_is_not_there_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    args: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, *args) == code
    assert words in capsys.readouterr().err


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


COMMANDS = (
    ("ls", "{}"),
    ("verify", "{}"),
    ("clean", "{}"),
    ("clean", "{}", "--max-gib", "0"),
    ("clean", "{}", "--failed", "--stale"),
    ("sync", "{}", "{other}"),
    ("sync", "{other}", "{}"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    "names",
    [
        ("notes.txt",),
        ("bin/sh", "etc/hosts"),
        (".nxtrain/mutex", "home/user/a"),
        ("neuronxcc/x", "neuronxcc-", "a b/c"),
    ],
    ids=str,
)
def test_a_folder_of_other_files_is_refused_and_nothing_is_left_in_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    root: Path,
    tmp_path: Path,
    command: tuple[str, ...],
    names: tuple[str, ...],
) -> None:
    folder = tmp_path / "other"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("theirs", encoding="utf-8")
    before = files(folder)
    assert main(monkeypatch, *(word.format(folder, other=root) for word in command)) == 2
    assert f"{folder} is no cache of compiled graphs: it holds " in capsys.readouterr().err
    assert files(folder) == before


@pytest.mark.parametrize("command", ["ls", "verify", "clean"])
def test_the_cache_of_a_configuration_may_be_empty_or_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[compile]\ncache_dir = "{tmp_path}/cache"\n', encoding="utf-8")
    assert main(monkeypatch, command, config) == 0
    assert not (tmp_path / "cache").exists(), "the command makes none"
    assert capsys.readouterr().out
    for names in ((), ("locks",), (".nxtrain",), ("neff",), (COMPILER, "a file of the user")):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        (tmp_path / "cache").mkdir()
        for name in names:
            (tmp_path / "cache" / name).mkdir()
        assert main(monkeypatch, command, config) == 0


def test_a_cache_that_cannot_be_written_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    """A file in the place of the folder for locks stops root too, whom permissions do not."""
    shutil.rmtree(root / ".nxtrain", ignore_errors=True)
    (root / ".nxtrain").touch()
    assert main(monkeypatch, "clean", root) == 5
    shown = capsys.readouterr().err
    assert str(root / ".nxtrain") in shown
    assert "Traceback" not in shown


def test_what_is_no_folder_cannot_be_filled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert main(monkeypatch, "sync", root, tmp_path / "file") == 5
    assert "Not a directory" in capsys.readouterr().err
