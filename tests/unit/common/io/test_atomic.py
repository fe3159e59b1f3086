"""A file appears whole or not at all, whoever is killed and whoever races."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.io import atomic
from nxtrain.common.io.atomic import clear_drafts, replace_bytes, replace_text, replacing

_KILLED_BEFORE = """
import os, signal, sys
from pathlib import Path
from nxtrain.common.io.atomic import replace_bytes

Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace_bytes(Path(sys.argv[1]), b"new" * 1000, durable=True, shared=sys.argv[2] == "shared")
"""

_RACER = """
import sys
from pathlib import Path
from nxtrain.common.io.atomic import replace_bytes

print(flush=True)
input()
for _ in range(int(sys.argv[3])):
    replace_bytes(Path(sys.argv[1]), sys.argv[2].encode() * 200_000, durable=False, shared=True)
"""


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("sharing", ["shared", "alone"])
def test_a_write_that_is_killed_before_its_rename_leaves_the_old_content(tmp_path: Path, sharing: str) -> None:
    (tmp_path / "file").write_bytes(b"old")
    for _ in range(2):
        killed = subprocess.run(
            [sys.executable, "-c", _KILLED_BEFORE, tmp_path / "file", sharing], timeout=60, check=False
        )
        assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "file").read_bytes() == b"old"
    left = [path for path in tmp_path.iterdir() if path.name != "file"]
    assert len(left) == (2 if sharing == "shared" else 1), "one writer's draft has one name"
    assert all(path.name.startswith(".file.") and path.read_bytes() == b"new" * 1000 for path in left)
    if sharing == "alone":
        replace_bytes(tmp_path / "file", b"newer", durable=False)
    clear_drafts(tmp_path)
    assert files(tmp_path) == {"file": b"newer" if sharing == "alone" else b"old"}


def test_writers_that_race_never_show_a_torn_file(tmp_path: Path) -> None:
    file, number = tmp_path / "file", 100
    replace_bytes(file, b"0" * 200_000, durable=False)
    argv = [sys.executable, "-c", _RACER, str(file)]
    racers = [
        subprocess.Popen([*argv, digit, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for digit in "12"
    ]
    for racer in racers:
        assert racer.stdout is not None
        racer.stdout.readline()
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(b"\n")
        racer.stdin.close()
    seen = set()
    while any(racer.poll() is None for racer in racers):
        content = file.read_bytes()
        assert (len(content), len(set(content))) == (200_000, 1)
        seen.add(content[:1])
    assert [racer.wait() for racer in racers] == [0, 0]
    assert seen & {b"1", b"2"}, "nothing was read while they wrote"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for racer in racers:
        assert racer.stdout is not None
        racer.stdout.close()


def test_a_draft_that_was_left_is_seen_by_no_pattern_of_a_reader_and_is_deleted(tmp_path: Path) -> None:
    for name in (".run.json.draft", f".run.json.{'0a' * 16}", ".hidden", "run.json", "run.json.draft"):
        (tmp_path / name).write_bytes(b"torn")
    clear_drafts(tmp_path)
    assert sorted(files(tmp_path)) == [".hidden", "run.json", "run.json.draft"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_a_file_has_the_permission_bits_of_a_plain_write(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "plain").write_bytes(b"")
        replace_text(tmp_path / "file", "text\n", durable=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "text\n"


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_write_syncs_the_content_before_the_rename_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    file, done = tmp_path / "file", list[tuple[str, bool]]()
    sync = os.fsync

    def noted(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        done.append((kind, file.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    replace_bytes(file, b"content", durable=durable)
    assert done == ([("file", False), ("folder", True)] if durable else [])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("fails", ["write", "sync", "rename"])
def test_a_write_that_fails_leaves_the_old_content_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, shared: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(draft: Path) -> None:
        draft.write_bytes(b"half")
        if fails == "write":
            full()

    (tmp_path / "file").write_bytes(b"old")
    with monkeypatch.context() as patch:
        if fails == "sync":
            patch.setattr(atomic, "sync_file", full)
        if fails == "rename":
            patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            attempt(tmp_path / "file", write, shared=shared)
    assert files(tmp_path) == {"file": b"old"}


def attempt(file: Path, write: Callable[[Path], None], *, shared: bool) -> None:
    with replacing(file, durable=True, shared=shared) as draft:
        write(draft)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "the name of an open stream", "a device"])
def test_what_is_no_file_is_never_replaced_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, sharing: bool
) -> None:
    """A rename would put the content in the place of `/dev/null` or `/dev/stdout`, for every process of the machine."""
    path = tmp_path / "out"
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        monkeypatch.chdir(tmp_path)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    elif kind == "a device":
        path.symlink_to("/dev/null")
    else:
        path.symlink_to("/proc/self/fd/1")
    before = path.lstat()
    with pytest.raises(FileExistsError, match=f"it is {kind}, not a file"):
        replace_text(path, "words", durable=False, shared=sharing)
    after = path.lstat()  # a look at a link changes the time of its last access
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
