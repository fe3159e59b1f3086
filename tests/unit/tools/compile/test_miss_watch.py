"""A run notices what it compiles beyond its manifest, and nothing that another run compiles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from nxtrain.tools.compile import miss_watch
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.compile_key import build_of
from nxtrain.tools.compile.entries import LOCK, CacheKey, EntryState
from nxtrain.tools.compile.manifest import CompiledGraph, GraphManifest, write_manifest
from nxtrain.tools.compile.miss_watch import MissWatch, watch_misses
from nxtrain.tools.compile.module_folders import OURS, ModuleFolders, naming
from tests.support import TINY
from tests.support.caches import COMPILER, add_done, add_locked, add_pending, compiling, key

LONG_S = 20.0
SECOND_RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process from which no compiler of these tests descends."""
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process.pid
        process.kill()


class MissRecorder:
    """Recorded misses of a watch."""

    def __init__(self) -> None:
        self.keys: list[tuple[CacheKey, int]] = []

    def __call__(self, of: CacheKey, compilers: Sequence[int]) -> None:
        self.keys.append((of, len(compilers)))


def watch(root: Path, recorder: MissRecorder, run: int, patience_s: float = 100.0) -> MissWatch:
    layout = ModuleFolders(root)
    layout.patience_s = patience_s
    return MissWatch(layout, {key(1)}, run, recorder)


def test_what_the_run_compiles_is_reported_once_unless_it_is_expected(tmp_path: Path) -> None:
    recorder = MissRecorder()
    guard = watch(tmp_path, recorder, os.getpid())
    processes = [compiling(tmp_path, key(number), LONG_S) for number in (1, 2)]
    try:
        end = time.monotonic() + 60
        while not recorder.keys and time.monotonic() < end:
            guard.poll()
            time.sleep(0.02)
        guard.poll()
        assert recorder.keys == [(key(2), 1)]
    finally:
        for process in processes:
            end_tree(process)


def test_what_another_run_compiles_is_not(tmp_path: Path, stranger: int) -> None:
    recorder = MissRecorder()
    guard = watch(tmp_path, recorder, stranger, patience_s=0.2)
    process = compiling(tmp_path, key(2), LONG_S)
    try:
        end = time.monotonic() + 60
        while not list(naming(key(2).module)):
            assert time.monotonic() < end
        for _ in range(5):
            guard.poll()
            time.sleep(0.1)
    finally:
        end_tree(process)
    assert recorder.keys == []


def test_a_lock_whose_compiler_nobody_sees_counts_after_a_while(tmp_path: Path, stranger: int) -> None:
    recorder = MissRecorder()
    patient, hasty = (watch(tmp_path, recorder, stranger, patience_s) for patience_s in (100.0, 0.0))
    add_locked(tmp_path, key(2))
    patient.poll()
    assert recorder.keys == []
    hasty.poll()
    time.sleep(0.01)
    hasty.poll()
    assert recorder.keys == [(key(2), 0)]


def test_locks_of_others_and_what_is_not_being_compiled_are_not_reported(tmp_path: Path, stranger: int) -> None:
    recorder = MissRecorder()
    add_locked(tmp_path, key(2))  # before the run
    guard = watch(tmp_path, recorder, stranger, patience_s=0.0)
    add_locked(tmp_path, key(3), OURS)  # ours, such as a sync
    add_pending(tmp_path, key(4))
    add_done(tmp_path, key(5))  # fetched from elsewhere
    for _ in range(3):
        guard.poll()
        time.sleep(0.01)
    assert recorder.keys == []
    lock = tmp_path / COMPILER / key(2).module / LOCK
    lock.unlink()
    add_locked_again(lock)
    for _ in range(2):
        guard.poll()
        time.sleep(0.01)
    assert recorder.keys == [(key(2), 0)]


def test_the_lock_of_a_run_that_was_stopped_is_broken_at_once(tmp_path: Path) -> None:
    add_locked(tmp_path, key(2))
    cache = Cache(tmp_path)
    assert cache.break_locks() == []  # a compiler's lock is believed for a while
    code = "import sys; from pathlib import Path; from nxtrain.tools.compile.cache import Cache; "
    code += "from nxtrain.tools.compile.entries "
    code += "import parse_key; Cache(Path(sys.argv[1])).mark_lock_stale(parse_key(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(key(2))], check=True, timeout=60)
    entry = cache.entry(key(2))
    assert entry is not None
    assert entry.state is EntryState.STALE
    assert cache.break_locks() == [key(2)]


def test_a_lock_that_was_given_up_does_not_come_back(tmp_path: Path) -> None:
    folder = add_pending(tmp_path, key(2))
    Cache(tmp_path).mark_lock_stale(key(2))
    assert not list(folder.glob("*.lock"))


@pytest.fixture
def neuron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_watch, "is_neuron", lambda config: True)
    monkeypatch.setattr(miss_watch, "installed", lambda name: None)


def run(folder: Path, *overrides: str, world: int = 1) -> Resolved:
    own = (f"compile.cache_dir={folder / 'cache'}", f"compile.manifest={folder / 'manifest.json'}")
    return resolve_config(load(TINY, (*own, *overrides)), world)


def compiled(folder: Path) -> None:
    build = build_of(run(folder), 1, {}, COMPILER)
    manifest = GraphManifest("tiny_cpu", build, (CompiledGraph("step 1 #1", key(1).module, 1.0),))
    write_manifest(manifest, folder / "manifest.json")


@pytest.mark.usefixtures("neuron")
def test_a_run_that_must_not_compile_needs_its_manifest_and_its_graphs(tmp_path: Path) -> None:
    stops = run(tmp_path, "compile.on_miss=stop")
    with pytest.raises(BackendError, match=r"on_miss=stop, but there is no .*; to write the manifest: nxtrain compile"):
        watch_misses(stops, {}).__enter__()
    compiled(tmp_path)
    with pytest.raises(BackendError, match="lacks 1 of the 1 graphs of tiny_cpu") as raised:
        watch_misses(stops, {}).__enter__()
    assert "step 1 #1" in str(raised.value)
    add_done(tmp_path / "cache", key(1))
    with watch_misses(stops, {}):
        pass


@pytest.mark.usefixtures("neuron")
def test_a_machine_of_some_stages_needs_the_graphs_of_these_only(tmp_path: Path) -> None:
    stops = run(tmp_path, "compile.on_miss=stop", "parallel.pp=2", "train.micro_batch=1", world=4)
    build = build_of(stops, 4, {}, COMPILER)
    write_manifest(
        GraphManifest("tiny_cpu", build, (CompiledGraph("step 1 #1", key(1).module, 1.0),), (0,)),
        tmp_path / "manifest.stages-0.json",
    )
    add_done(tmp_path / "cache", key(1))
    first, last = ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": rank} for rank in ("0", "2"))
    with watch_misses(stops, first):
        pass
    words = (
        r"there is no .*/manifest\.stages-1\.json, the manifest of a machine that holds pipeline stage 1 of 2, but "
        r".*/manifest\.stages-0\.json; to write the manifest:"
    )
    with pytest.raises(BackendError, match=words):
        watch_misses(stops, last).__enter__()
    write_manifest(
        GraphManifest("tiny_cpu", build, (CompiledGraph("step 1 #1", key(2).module, 1.0),), (1,)),
        tmp_path / "manifest.stages-1.json",
    )
    with pytest.raises(BackendError, match="lacks 1 of the 1 graphs of tiny_cpu, pipeline stage 1 of 2, "):
        watch_misses(stops, last).__enter__()
    with watch_misses(stops, first):
        pass


@pytest.mark.usefixtures("neuron")
def test_a_run_that_may_compile_is_told_what_it_will_compile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with watch_misses(run(tmp_path), {}):
        pass
    assert "every graph that" in capsys.readouterr().err
    compiled(tmp_path)
    with watch_misses(run(tmp_path, "train.micro_batch=8"), {}):
        pass
    said = capsys.readouterr().err
    assert "warning: " in said
    assert "lacks 1 of the 1 graphs of tiny_cpu" in said
    assert "    train.micro_batch: compiled 16, needed 8\n" in said
    add_done(tmp_path / "cache", key(1))
    with watch_misses(run(tmp_path), {}):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("neuron")
def test_a_manifest_that_cannot_be_read_ends_only_a_run_that_must_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").write_text("no JSON", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid JSON"):
        watch_misses(run(tmp_path, "compile.on_miss=stop"), {}).__enter__()
    with watch_misses(run(tmp_path), {}):
        pass
    assert "warning: " in (said := capsys.readouterr().err)
    assert "not valid JSON" in said


@pytest.mark.usefixtures("neuron")
@pytest.mark.parametrize("environ", [SECOND_RANK, {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}])
def test_other_ranks_and_extraction_are_left_alone(tmp_path: Path, environ: dict[str, str]) -> None:
    with watch_misses(run(tmp_path, "compile.on_miss=stop"), environ):
        assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_runs_on_other_devices_are_left_alone(tmp_path: Path, backend: str) -> None:
    with watch_misses(run(tmp_path, "compile.on_miss=stop", f"backend.name={backend}"), {}):
        assert not (tmp_path / "cache").exists()


def add_locked_again(lock: Path) -> None:
    time.sleep(0.02)
    lock.touch()


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a stand-in rank and its compiler, even one that starts at this moment."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
