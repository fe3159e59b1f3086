"""A lock counts while its owner lives: told by process, boot and machine, or, where it names none, by what runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nxtrain.tools.compile.lock_owners import FOREIGN_S, PROC, Owner, lock_is_live, read_owner, this_process

pytestmark = pytest.mark.skipif(not PROC.exists(), reason="this system has no /proc")

ENTRY = "MODULE_00000000000000000042+abc"


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    return tmp_path / ENTRY


def lock(folder: Path, text: str, age_s: float = 0.0) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "model.hlo_module.pb.lock"
    path.write_text(text, encoding="utf-8")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_an_owner_reads_back_as_it_was_written() -> None:
    assert read_owner(str(this_process())) == this_process()
    assert read_owner(f"4f2a {this_process()}") == this_process()
    assert read_owner("") is None


@pytest.mark.parametrize("age_s", [0.0, 10 * FOREIGN_S])
def test_our_own_lock_counts_while_we_live_however_old(entry: Path, age_s: float) -> None:
    assert lock_is_live(lock(entry, str(this_process()), age_s), entry)


def test_a_killed_process_holds_nothing_not_even_as_a_zombie(entry: Path) -> None:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from nxtrain.tools.compile.lock_owners import *; print(this_process(), flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        path = lock(entry, child.stdout.readline())
        assert lock_is_live(path, entry)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not lock_is_live(path, entry)
    assert not lock_is_live(path, entry)


@pytest.mark.parametrize("change", [{"start": 1}, {"boot": "another-boot"}], ids=["number reused", "machine restarted"])
def test_another_process_of_the_same_number_is_not_the_owner(entry: Path, change: dict[str, int | str]) -> None:
    assert not lock_is_live(lock(entry, str(replace(this_process(), **change))), entry)  # type: ignore[arg-type]


def test_a_lock_of_another_machine_counts_until_it_is_old(entry: Path) -> None:
    text = str(Owner(1, 1, "boot", "elsewhere:pid:[4026531836]"))
    assert lock_is_live(lock(entry, text, FOREIGN_S - 60), entry)
    assert not lock_is_live(lock(entry, text, FOREIGN_S + 60), entry)


def test_a_compilers_lock_counts_for_a_while_and_then_only_if_a_process_names_its_entry(entry: Path) -> None:
    assert lock_is_live(lock(entry, "", age_s=10), entry, grace_s=20)
    old = lock(entry, "", age_s=30)
    assert not lock_is_live(old, entry, grace_s=20)
    argv = [sys.executable, "-S", "-c", "print(flush=True); input()", "neuronx-cc", f"model.{ENTRY}.neff"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as compiler:
        assert compiler.stdout is not None
        compiler.stdout.readline()
        assert lock_is_live(old, entry, grace_s=20)
        other = entry.with_name("MODULE_00000000000000000043+abc")
        assert not lock_is_live(lock(other, "", age_s=30), other, grace_s=20)
        compiler.kill()
    assert not lock_is_live(old, entry, grace_s=20)


def test_a_write_to_the_entry_keeps_a_compilers_lock_alive(entry: Path) -> None:
    old = lock(entry, "", age_s=30)
    (entry / "model.neff").touch()
    assert lock_is_live(old, entry, grace_s=20)


def test_a_compilers_lock_from_before_the_last_start_of_the_machine_is_stale(entry: Path) -> None:
    booted = next(line for line in (PROC / "stat").read_text().splitlines() if line.startswith("btime"))
    age_s = time.time() - float(booted.split()[1])
    assert lock_is_live(lock(entry, "", age_s - 60), entry, grace_s=2 * age_s)
    assert not lock_is_live(lock(entry, "", age_s + 60), entry, grace_s=2 * age_s)


def test_a_lock_that_was_taken_away_from_an_empty_entry_is_judged_by_itself(entry: Path) -> None:
    taken = lock(entry, "", age_s=30).rename(entry.with_name("taken"))
    assert not lock_is_live(taken, entry, grace_s=20)


def test_a_lock_that_is_let_go_while_we_look_was_live(entry: Path) -> None:
    assert lock_is_live(entry / "gone.lock", entry)
