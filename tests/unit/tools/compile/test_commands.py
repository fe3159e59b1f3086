"""`nxtrain cache` as people and scripts meet it: tables, JSON, messages and exit codes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from nxtrain.tools.compile.entries import NEFF
from tests.support import commands
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


def run(*args: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command on a cache."""
    return commands.in_process("cache", *args)


def lines_of(*args: object) -> list[str]:
    """Lines of a command that succeeds."""
    code, out, _ = run(*args)
    assert code == 0
    return out.splitlines()


def test_ls_shows_every_entry_its_state_and_how_to_mend_it(root: Path) -> None:
    lines = lines_of("ls", root)
    for number, state in enumerate(("done", "failed", "stale", "pending"), start=1):
        assert [line.split()[:3] for line in lines if key(number).module in line] == [
            [state, COMPILER.removeprefix("neuronxcc-"), key(number).module]
        ]
    assert lines[-2].startswith("1 done, 1 failed, 1 stale, 1 pending; ")
    assert lines[-1] == f"to mend: nxtrain cache clean {root} --failed --stale"


def test_ls_prints_json(root: Path) -> None:
    shown = json.loads("\n".join(lines_of("ls", root, "--json")))
    assert shown["folder"] == str(root)
    assert shown["counts"] == {"done": 1, "failed": 1, "locked": 0, "stale": 1, "pending": 1}
    assert [entry["state"] for entry in shown["entries"]] == ["done", "failed", "stale", "pending"]
    assert shown["entries"][1]["detail"] == "Failed compilation with exit code 70"
    assert shown["bytes"] == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_clean_mends_everything_by_default_and_only_what_is_asked_for_otherwise(root: Path) -> None:
    assert lines_of("clean", root, "--stale")[:-1] == [f"{key(3)}  lock broken"]
    assert lines_of("clean", root)[:-1] == [f"{key(2)}  into quarantine"]
    assert len(lines_of("clean", root, "--max-gib", "0")) == 5
    assert lines_of("ls", root)[-1] == "empty; 0 B"


def test_verify_ends_with_5_when_something_was_damaged(root: Path) -> None:
    assert lines_of("verify", root)[-1].startswith("0 as they were sealed, 1 hashed for the first time")
    (root / COMPILER / key(1).module / NEFF).write_bytes(b"torn")
    code, _, err = run("verify", root)
    assert (code, "1 of 1 entries of" in err) == (5, True)
    assert run("verify", root)[0] == 0


def test_sync_copies_once_and_reports_what_it_could_not_take(root: Path, tmp_path: Path) -> None:
    for words in ("1 copied (", "0 copied (0 B), 1 there already"):
        assert lines_of("sync", root, tmp_path / "shared")[0].startswith(words)
    (tmp_path / "shared" / COMPILER / key(1).module / NEFF).write_bytes(b"torn")
    code, out, err = run("sync", tmp_path / "shared", tmp_path / "other")
    assert code == 5
    assert out.startswith("0 copied (0 B), 0 there already")
    assert f"    {key(1)}: damaged: model.neff has 4 bytes" in err


def test_a_configuration_file_stands_for_its_cache_dir(root: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[compile]\ncache_dir = "{root}"\n', encoding="utf-8")
    assert json.loads("\n".join(lines_of("ls", config, "--json")))["folder"] == str(root)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["ls", "absent"], 2, "absent is not a folder"),
        (["ls"], 2, "compile_cache"),
        (["verify", "s3://bucket/prefix"], 2, "is a bucket; this command works on a folder"),
        (["sync", "absent", "other"], 2, "absent is not a folder"),
        (["ls", "absent.toml"], 2, "cannot read absent.toml"),
    ],
)
def test_a_place_that_is_not_there_is_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result, _, err = run(*args)
    assert (result, words in err) == (code, True)


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
    code, _, err = run(*(word.format(folder, other=root) for word in command))
    assert code == 2
    assert f"{folder} is not a cache of compiled graphs: it holds " in err
    assert files(folder) == before


@pytest.mark.parametrize("command", ["ls", "verify", "clean"])
def test_the_cache_of_a_configuration_may_be_empty_or_not_there_yet(tmp_path: Path, command: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[compile]\ncache_dir = "{tmp_path}/cache"\n', encoding="utf-8")
    assert lines_of(command, config)
    assert not (tmp_path / "cache").exists(), "the command makes none"
    for names in ((), ("locks",), (".nxtrain",), ("neff",), (COMPILER, "a file of the user")):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        (tmp_path / "cache").mkdir()
        for name in names:
            (tmp_path / "cache" / name).mkdir()
        assert run(command, config)[0] == 0


def test_a_cache_that_cannot_be_written_is_one_message(root: Path) -> None:
    """A file in the place of the folder for locks stops root too, whom permissions do not."""
    shutil.rmtree(root / ".nxtrain", ignore_errors=True)
    (root / ".nxtrain").touch()
    code, _, err = run("clean", root)
    assert (code, str(root / ".nxtrain") in err) == (5, True)


def test_what_is_no_folder_cannot_be_filled(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = run("sync", root, tmp_path / "file")
    assert (code, "Not a directory" in err) == (5, True)
