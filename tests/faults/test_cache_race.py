"""Eight processes compile, sync, mend and evict on the same caches while a killer ends some at random."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from nxtrain.tools.compile.cache import OWN, Cache
from nxtrain.tools.compile.entries import NEFF, CacheKey, EntryState, parse_key
from nxtrain.tools.compile.sync import sync
from tests.support.caches import TWO_COMPILERS, add_failed, compiling, key, neff

NUM_PROCESSES = 8
NUM_KILLS = 24
KILL_EVERY_S = 0.3
NUM_GRAPHS = 60
GRACE_S = 4.0  # more than a busy machine makes a process wait between its lock and its compiler
FAILING = 100  # graphs from this number on cannot be compiled


def work(folder: Path, seed: int) -> None:
    """One process: acts until it is killed or `stop` appears, and writes what it finished to `journal`."""
    os.setsid()  # so that it can be killed with its compiler, or without
    draw = random.Random(seed)
    running = os.open(folder / "running", os.O_CREAT | os.O_RDWR)
    fcntl.flock(running, fcntl.LOCK_SH)
    node, shared, small = (Cache(folder / name, grace_s=GRACE_S) for name in ("node", "shared", "small"))

    def note(where: Cache, keys: list[CacheKey]) -> None:
        with (folder / "journal").open("a", encoding="utf-8") as file:
            file.write("".join(f"{where.root.name} {of}\n" for of in keys))  # one write: no line is torn

    def compile_one() -> None:
        of = key(draw.randrange(NUM_GRAPHS))
        code = compiling(node.root, of, pause_s=draw.choice((0.0, 0.1)), keep=running).wait()
        assert code != TWO_COMPILERS, of
        if code == 0:
            note(node, [of])

    def fail_one() -> None:
        with suppress(FileExistsError):
            add_failed(node.root, key(FAILING + draw.randrange(NUM_GRAPHS)))

    def publish() -> None:
        note(shared, sync(node, shared).copied)

    def fetch() -> None:
        note(node, sync(shared, node).copied)

    def shrink() -> None:
        sync(shared, small)
        small.evict(5 * len(neff(key(0))))

    def mend() -> None:
        for cache in (node, shared, small):
            cache.sweep()
            cache.break_locks()
            cache.quarantine_failed()

    def verify() -> None:
        damaged = [verdict for cache in (node, shared, small) for verdict in cache.verify() if verdict.damage]
        assert not damaged, damaged

    actions: list[Callable[[], None]] = [compile_one, compile_one, fail_one, publish, fetch, shrink, mend, verify]
    try:
        for cache in (node, shared, small):
            cache.root.mkdir(exist_ok=True)
        while not (folder / "stop").exists():
            draw.choice(actions)()
    except BaseException as error:
        (folder / f"error-{os.getpid()}").write_text(repr(error), encoding="utf-8")
        raise


@pytest.mark.timeout(120)
def test_nothing_is_torn_or_lost_when_processes_race_and_are_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    draw = random.Random(0)

    def start(seed: int) -> ForkServerProcess:
        process = context.Process(target=work, args=(tmp_path, seed))
        process.start()
        return process

    processes = [start(seed) for seed in range(NUM_PROCESSES)]
    try:
        for kill in range(NUM_KILLS):
            time.sleep(KILL_EVERY_S)
            number = draw.randrange(NUM_PROCESSES)
            victim = processes[number]
            if draw.random() < 0.5:
                victim.kill()  # its compiler goes on without it
            else:
                with suppress(ProcessLookupError):  # it has not yet made its group
                    os.killpg(victim.pid or 0, signal.SIGKILL)
            processes[number] = start(NUM_PROCESSES + kill)
            victim.kill()
            victim.join()
        (tmp_path / "stop").touch()
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    assert [path.read_text() for path in tmp_path.glob("error-*")] == []
    assert [process.exitcode for process in processes] == [0] * NUM_PROCESSES
    _wait_for_orphans(tmp_path)

    done = {}
    for name in ("node", "shared", "small"):
        cache = Cache(tmp_path / name, grace_s=0.0)
        cache.sweep()
        cache.break_locks()
        cache.quarantine_failed()
        done[name] = cache.done()
        for entry in cache.entries():
            # A compiler that was killed leaves a graph that is yet to be compiled, on its own node only.
            assert entry.state in ({EntryState.DONE, EntryState.PENDING} if name == "node" else {EntryState.DONE}), (
                entry
            )
            if entry.state is EntryState.DONE:
                assert (entry.folder / NEFF).read_bytes() == neff(entry.key), entry
        assert [verdict for verdict in cache.verify() if verdict.damage] == []
        assert list((cache.root / OWN / "staging").glob("*")) == []
    assert done["small"] <= done["shared"]

    lines = (tmp_path / "journal").read_text(encoding="utf-8").splitlines()
    finished = {(where, parse_key(text)) for where, text in map(str.split, lines)}
    assert {(where, of) for where, of in finished if of not in done[where]} == set()
    assert len(finished) > NUM_GRAPHS  # the race was one

    node = Cache(tmp_path / "node")
    for entry in node.entries():  # no graph is barred from being compiled
        if entry.state is EntryState.PENDING:
            with compiling(node.root, entry.key) as rank:
                assert rank.wait(timeout=120) == 0
            assert entry.key in node.done()


def _wait_for_orphans(folder: Path) -> None:
    """Ranks whose parents were killed without them end by themselves, once no stale lock is in their way."""
    cache = Cache(folder / "node", grace_s=GRACE_S)
    with (folder / "running").open() as running:
        while True:
            cache.break_locks()
            try:
                return fcntl.flock(running, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
