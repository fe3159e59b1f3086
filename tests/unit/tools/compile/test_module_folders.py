"""A compiler's lock counts for a while, and then only while a process names its entry."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nxtrain.tools.compile.entries import LOCK, CacheKey, EntryState
from nxtrain.tools.compile.module_folders import PROC, ModuleFolders
from tests.support.caches import key

pytestmark = pytest.mark.skipif(
    not PROC.exists(), reason="compilers are looked for in /proc, which this system lacks: runs on Linux"
)

ENTRY = key(42)


def lock(root: Path, of: CacheKey = ENTRY, age_s: float = 0.0, text: str = "") -> None:
    """Write the lock of an entry, with an age in seconds."""
    folder = root / str(of)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOCK).write_text(text, encoding="utf-8")
    os.utime(folder / LOCK, (time.time() - age_s,) * 2)


def is_live(root: Path, of: CacheKey = ENTRY, grace_s: float = 20) -> bool:
    entry = ModuleFolders(root, grace_s).look(root / str(of), of)
    assert entry is not None
    assert entry.state in {EntryState.LOCKED, EntryState.STALE}
    return entry.state is EntryState.LOCKED


def test_a_compilers_lock_counts_for_a_while_and_then_only_if_a_process_names_its_entry(tmp_path: Path) -> None:
    lock(tmp_path, age_s=10)
    assert is_live(tmp_path)
    lock(tmp_path, age_s=30)
    assert not is_live(tmp_path)
    argv = [sys.executable, "-S", "-c", "print(flush=True); input()", "neuronx-cc", f"model.{ENTRY.module}.neff"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as compiler:
        assert compiler.stdout is not None
        compiler.stdout.readline()
        assert is_live(tmp_path)
        lock(tmp_path, key(43), age_s=30)
        assert not is_live(tmp_path, key(43))
        compiler.kill()
    assert not is_live(tmp_path)


def test_a_write_to_the_entry_keeps_a_compilers_lock_alive(tmp_path: Path) -> None:
    lock(tmp_path, age_s=30)
    (tmp_path / str(ENTRY) / "model.neff").touch()
    assert is_live(tmp_path)


def test_a_compilers_lock_from_before_the_last_start_of_the_machine_is_stale(tmp_path: Path) -> None:
    booted = next(line for line in (PROC / "stat").read_text().splitlines() if line.startswith("btime"))
    age_s = time.time() - float(booted.split()[1])
    lock(tmp_path, age_s=age_s - 60)
    assert is_live(tmp_path, grace_s=2 * age_s)
    lock(tmp_path, age_s=age_s + 60)
    assert not is_live(tmp_path, grace_s=2 * age_s)


def test_a_lock_that_is_let_go_while_we_look_was_live(tmp_path: Path) -> None:
    assert ModuleFolders(tmp_path)._is_live(tmp_path / str(ENTRY) / LOCK)
