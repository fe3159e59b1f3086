"""Files that are none: what a reader must refuse rather than wait for, and folders that a user may not enter."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TypeVar

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A folder on a file system of its own; skips the test where none can be mounted."""
    folder.mkdir(parents=True)
    mount = ("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder))
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a tmpfs, and not in every container; runs as root on Linux")
    try:
        yield folder
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)


T = TypeVar("T")

KINDS = ("a FIFO", "a socket", "a device")

NOBODY = 65534


def put(path: Path, kind: str) -> None:
    """Put a special file in the place of another, or where there was none."""
    path.unlink(missing_ok=True)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to(os.devnull)
    else:
        before = Path.cwd()
        os.chdir(path.parent)  # addresses of sockets are short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(before)


def in_time(action: Callable[[], T], within_s: float = 30.0) -> T:
    """Result of an action that must not hang; a thread that does is left behind."""
    found: list[T] = []
    failed: list[BaseException] = []

    def act() -> None:
        try:
            found.append(action())
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=act, daemon=True)
    thread.start()
    thread.join(within_s)
    assert not thread.is_alive(), "it hangs"
    if failed:
        raise failed[0]
    return found[0]


@contextmanager
def as_nobody() -> Iterator[Path]:
    """Act as a user whom rights bind, and not as root; yields a folder of that user."""
    folder = Path(tempfile.mkdtemp(prefix="nxtrain-nobody-"))
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        for path in folder.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)
