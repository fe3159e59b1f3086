"""Changes to a cache are whole or absent, and leave alone what somebody works on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nxtrain.tools.compile.cache import OWN, Cache, UnusableEntryError
from nxtrain.tools.compile.entries import DONE, LOCK, NEFF, SEAL, CacheKey, EntryState, Seal, hash_file, parse_key
from nxtrain.tools.compile.module_folders import OURS
from tests.support.caches import COMPILER, add_done, add_failed, add_locked, add_pending, compiling, key, neff


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", grace_s=0.0)


def patient(cache: Cache) -> Cache:
    """The same cache, for which each lock of the compiler is live."""
    return Cache(cache.root, grace_s=3600)


def filled(folder: Path, of: CacheKey) -> Seal:
    """Write the files of an entry."""
    (folder / NEFF).write_bytes(neff(of))
    (folder / DONE).touch()
    return {path.name: hash_file(path) for path in folder.iterdir()}


def store(cache: Cache, of: CacheKey) -> bool:
    with cache.staging() as folder:
        return cache.store(of, folder, filled(folder, of))


def leftovers(cache: Cache) -> list[str]:
    """Names in our own folder besides the mutex and the quarantine."""
    return [path.name for path in (cache.root / OWN / "staging").glob("*")]


def states(cache: Cache) -> dict[CacheKey, EntryState]:
    return {entry.key: entry.state for entry in cache.entries()}


def test_every_state_is_told_by_the_files(cache: Cache) -> None:
    add_done(cache.root, key(1))
    add_failed(cache.root, key(2))
    add_locked(cache.root, key(3), OURS)
    add_locked(cache.root, key(4))
    add_pending(cache.root, key(5))
    (add_pending(cache.root, key(6)) / DONE).touch()
    (add_done(cache.root, key(7)) / NEFF).write_bytes(b"")
    (add_done(cache.root, key(8)) / DONE).unlink()
    (add_done(cache.root, key(9)) / LOCK).touch()
    (cache.root / COMPILER / "lost+found").mkdir()
    expected = ["done", "failed", "stale", "stale", "pending", "failed", "failed", "pending", "stale"]
    assert [state.value for state in states(cache).values()] == expected
    assert states(patient(cache))[key(4)] is EntryState.LOCKED
    details = [entry.detail for entry in cache.entries()]
    assert details[1] == "Failed compilation with exit code 70"
    assert details[5] == "marked done, but model.neff is missing or empty"


def test_an_empty_or_absent_cache_has_no_entries(cache: Cache) -> None:
    assert cache.entries() == []
    cache.root.mkdir()
    assert (cache.entries(), cache.entry(key(1)), cache.size_bytes(key(1))) == ([], None, 0)


@pytest.mark.parametrize("text", ["neuronxcc-2/../MODULE_1+a", "x/MODULE_1+a", "neuronxcc-2/MODULE_1/x", "neuronxcc-2"])
def test_a_key_never_leads_out_of_the_cache(text: str) -> None:
    assert parse_key(text) is None


def test_a_stored_entry_is_whole_and_sealed(cache: Cache) -> None:
    assert store(cache, key(1))
    assert states(cache) == {key(1): EntryState.DONE}
    assert [(verdict.damage, verdict.is_new) for verdict in cache.verify()] == [("", False)]
    assert leftovers(cache) == []


def test_what_is_done_is_never_replaced(cache: Cache) -> None:
    folder = add_done(cache.root, key(1))
    (folder / NEFF).write_bytes(b"mine")
    assert not store(cache, key(1))
    assert (folder / NEFF).read_bytes() == b"mine"


def test_what_somebody_works_on_is_left_to_him(cache: Cache) -> None:
    cache = patient(cache)
    add_locked(cache.root, key(1))
    assert not store(cache, key(1))
    assert (cache.break_locks(), cache.quarantine_failed(), cache.evict(0)) == ([], [], [])
    assert states(cache) == {key(1): EntryState.LOCKED}


@pytest.mark.parametrize("add", [add_failed, add_locked, add_pending])
def test_what_is_of_no_use_makes_way(cache: Cache, add: Callable[[Path, CacheKey], Path]) -> None:
    add(cache.root, key(1))
    assert store(cache, key(1))
    assert states(cache) == {key(1): EntryState.DONE}
    assert leftovers(cache) == []


def test_a_store_that_fails_leaves_nothing(cache: Cache) -> None:
    with pytest.raises(UnusableEntryError, match="torn"), cache.staging() as folder:
        (folder / NEFF).write_bytes(b"half")
        raise UnusableEntryError("torn")
    assert (cache.entries(), leftovers(cache)) == ([], [])


def test_a_compiler_that_begins_during_a_store_keeps_its_entry(cache: Cache) -> None:
    cache = patient(cache)
    with cache.staging() as folder:
        add_locked(cache.root, key(1))
        assert not cache.store(key(1), folder, filled(folder, key(1)))
    assert states(cache) == {key(1): EntryState.LOCKED}


@pytest.mark.parametrize("owner", ["", OURS], ids=["the compiler's", "ours"])
def test_stale_locks_are_broken_and_the_entry_becomes_what_it_was(cache: Cache, owner: str) -> None:
    add_locked(cache.root, key(1), owner)
    (add_done(cache.root, key(2)) / LOCK).write_text(owner, encoding="utf-8")
    assert cache.break_locks() == [key(1), key(2)]
    assert states(cache) == {key(1): EntryState.PENDING, key(2): EntryState.DONE}
    assert leftovers(cache) == []


def test_whoever_waits_for_a_stale_lock_goes_on_once_it_is_broken(cache: Cache) -> None:
    add_locked(cache.root, key(1))
    with compiling(cache.root, key(1)) as rank:
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(timeout=0.2)
        assert cache.break_locks() == [key(1)]
        assert rank.wait(timeout=120) == 0
    assert states(cache) == {key(1): EntryState.DONE}


def test_a_lock_that_changed_hands_stays(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_locked(cache.root, key(1))
    looked = cache.entries()
    assert [entry.state for entry in looked] == [EntryState.STALE]
    cache = patient(cache)
    (folder / LOCK).touch()
    monkeypatch.setattr(cache, "entries", lambda: looked)
    cache.break_locks()
    assert (folder / LOCK).exists()


def test_failed_entries_go_aside_and_the_newest_of_a_name_stays_there(cache: Cache) -> None:
    for text in ("first", "second"):
        (add_failed(cache.root, key(1)) / "model.log").write_text(text, encoding="utf-8")
        assert cache.quarantine_failed() == [key(1)]
        assert cache.entries() == []
    assert [(entry.key, entry.state, entry.detail) for entry in cache.quarantined()] == [
        (key(1), EntryState.FAILED, "second")
    ]
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: os.truncate(folder / NEFF, 10), "model.neff has 10 bytes, not"),
        (lambda folder: (folder / "compile_flags.json").unlink(), "compile_flags.json is missing"),
        (lambda folder: (folder / NEFF).write_bytes(neff(key(2))), "model.neff has SHA-256"),
    ],
    ids=["cut short", "missing", "changed"],
)
def test_verify_takes_damaged_entries_out_of_use(cache: Cache, harm: Callable[[Path], object], words: str) -> None:
    folder = add_done(cache.root, key(1))
    assert [verdict.is_new for verdict in cache.verify()] == [True]
    harm(folder)
    with pytest.raises(UnusableEntryError, match=words):
        cache.fetch(key(1), cache.root / COMPILER)
    assert [words in verdict.damage for verdict in cache.verify()] == [True]
    assert (cache.entries(), [entry.key for entry in cache.quarantined()]) == ([], [key(1)])


def test_an_entry_that_is_damaged_again_replaces_the_quarantined_one_and_leaves_no_trash(cache: Cache) -> None:
    for _ in range(2):
        folder = add_done(cache.root, key(1))
        list(cache.verify())
        (folder / NEFF).write_bytes(neff(key(2)))
        list(cache.verify())
    assert [entry.key for entry in cache.quarantined()] == [key(1)]
    assert leftovers(cache) == []


def test_an_entry_compiled_anew_is_not_held_to_its_old_seal(cache: Cache) -> None:
    folder = add_done(cache.root, key(1))
    list(cache.verify())
    for name in (NEFF, DONE):
        (folder / name).unlink()
    (folder / NEFF).write_bytes(b"another build of the same graph")
    (folder / DONE).touch()
    assert [(verdict.damage, verdict.is_new) for verdict in cache.verify()] == [("", True)]


def test_a_torn_seal_is_none(cache: Cache) -> None:
    folder = add_done(cache.root, key(1))
    (folder / SEAL).write_text('{"done_ns": 1, "fi', encoding="utf-8")
    assert [(verdict.damage, verdict.is_new) for verdict in cache.verify()] == [("", True)]


def test_eviction_removes_what_was_used_longest_ago_and_the_quarantine_first(cache: Cache) -> None:
    add_failed(cache.root, key(9))
    cache.quarantine_failed()
    for age, number in enumerate((3, 1, 2)):
        folder = add_done(cache.root, key(number))
        for path in (folder / NEFF, folder):
            os.utime(path, (1e9 - age,) * 2)
    size = cache.size_bytes(key(1))
    assert cache.evict(3 * size) == [key(9)]
    assert cache.evict(3 * size) == []
    assert cache.evict(3 * size - 1) == [key(2)]
    cache.mark_used([key(1)])
    assert cache.evict(size) == [key(3)]
    assert states(cache) == {key(1): EntryState.DONE}
    assert leftovers(cache) == []


def test_hashing_does_not_count_as_use(cache: Cache) -> None:
    folder = add_done(cache.root, key(1))
    for path in (folder / NEFF, folder):
        os.utime(path, (1e9, 1e9))
    list(cache.verify())
    entry = cache.entry(key(1))
    assert entry and entry.used_s == 1e9


def test_what_a_killed_store_left_is_swept_and_what_a_live_one_does_is_not(cache: Cache) -> None:
    script = (
        "import sys; from pathlib import Path; from nxtrain.tools.compile.cache import Cache\n"
        "with Cache(Path(sys.argv[1])).staging() as folder:\n"
        "    (folder / 'model.neff').write_bytes(b'half'); print(flush=True); input()\n"
    )
    argv = [sys.executable, "-c", script, str(cache.root)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        cache.sweep()
        assert len(leftovers(cache)) == 1
        child.kill()
    cache.sweep()
    assert (cache.entries(), leftovers(cache)) == ([], [])
