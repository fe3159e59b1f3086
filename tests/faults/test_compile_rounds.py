"""Graphs are compiled by the emulated tool, whatever goes wrong there; the tool's exit status decides nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nxtrain.common.errors import BackendError
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.entries import LOCK, CacheKey, EntryState
from nxtrain.tools.compile.parallel_compile import Compiled, compile_graphs
from nxtrain.tools.compile.tool import TOOL
from tests.support import ROOT
from tests.support.caches import add_failed, add_locked
from tests.support.neuron_machine import PAUSE, Plugin, install
from tests.support.parallel_compile import FAULTS

A, B, C = "a" * 16, "b" * 16, "c" * 16
TRIAL = (sys.executable, "-m", "tests.support.neuron_machine")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The variables of a job on a machine with the emulated tool, but without its devices."""
    shell = install(tmp_path)
    (tmp_path / "faults").mkdir()
    return {
        **shell,
        "PYTHONPATH": str(ROOT),
        "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"),
        "NEURON_CC_FLAGS": "--model-type=transformer --retry_failed_compilation",
        FAULTS: str(tmp_path / "faults"),
        "TMPDIR": str(tmp_path),
    }


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Redirect temporary files into the test's folder, since failed compilations keep their logs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield


def keys(env: dict[str, str], *graphs: str) -> list[CacheKey]:
    plugin = Plugin(env)
    return [plugin.key(graph) for graph in graphs]


def tool(env: dict[str, str]) -> str:
    return shutil.which(TOOL, path=env["PATH"]) or ""


def compiled(
    env: dict[str, str], *script: str, workers: int = 2, retries: int = 0, grace_s: float = 300.0
) -> tuple[Compiled, Cache]:
    cache = Cache(Path(env["NEURON_COMPILE_CACHE_URL"]), grace_s=grace_s)
    folder = Path(tempfile.mkdtemp(prefix="nxtrain-compile-"))
    return compile_graphs(tool(env), (*TRIAL, *script), env, cache, folder, workers, retries), cache


def faults(env: dict[str, str], *kinds: str) -> None:
    for number, kind in enumerate(kinds):
        (Path(env[FAULTS]) / f"{number}-{kind}").touch()


def test_what_a_run_shows_is_compiled_sealed_and_named(
    env: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result, cache = compiled(env, A, "step 1:", B, "log 1:", C)
    assert result.names == dict(zip(keys(env, A, B, C), ("start #1", "step 1 #1", "log 1 #1"), strict=True))
    assert cache.done() == set(result.names)
    assert all(cache.layout(of.compiler).read_seal(of) for of in cache.done())
    assert sorted(result.seconds) == sorted(result.names)
    assert all(seconds is not None and 0 < seconds < 20 for seconds in result.seconds.values())
    printed = capfd.readouterr()
    assert "||NEURON_PARALLEL_COMPILE||: New graph list from script 3" in printed.out
    assert "nxtrain compile: 3 of 3 graphs done, " in printed.err
    again, _ = compiled(env, A, "step 1:", B, "log 1:", C)
    assert (again.names, again.seconds) == (result.names, {})  # the tool compiles nothing and says 0


def test_a_graph_that_fails_is_tried_again_and_then_named(
    env: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    faults(env, "error")
    result, cache = compiled(env, A, B, workers=1, retries=1)
    assert cache.done() == set(result.names) == set(keys(env, A, B))
    said = capfd.readouterr().err
    assert "1 of 2 graphs failed; once more, up to 1 at a time\n" in said
    assert f"put {keys(env, A)[0]} aside, which failed before" in said


def test_one_failed_graph_is_told_from_a_failed_script(env: dict[str, str], tmp_path: Path) -> None:
    faults(env, "error")
    with pytest.raises(BackendError) as raised:  # the tool ends with 1, for one graph
        compiled(env, "step 1:", A, B, workers=1)
    lines = str(raised.value).splitlines()
    failed = keys(env, A)[0]
    assert lines[:1] == ["1 of 2 graphs could not be compiled:"]
    assert lines[1].startswith(
        f"    step 1 #1 ({failed.module}): Failed compilation with ['neuronx-cc', 'compile']: [NCC"
    )
    assert len(lines) == 3
    assert str(failed) in lines[1]
    with pytest.raises(
        BackendError, match="the run that extracts the graphs failed, so no graph was compiled"
    ) as raised:
        compiled(env, A, "fail")  # the tool ends with 1, for the script
    log = Path(str(raised.value).rpartition(" ")[2])
    assert log.is_relative_to(tmp_path)
    assert "this script fails" in log.read_text()


def test_more_failures_than_an_exit_status_counts_are_failures(env: dict[str, str]) -> None:
    graphs = [f"{number:016x}" for number in range(256)]
    faults(env, *["error"] * 256)
    with pytest.raises(BackendError, match="256 of 256 graphs could not be compiled"):  # the tool ends with 0
        compiled(env, *graphs, workers=1)


def test_a_script_that_shows_nothing_is_no_success(env: dict[str, str]) -> None:
    with pytest.raises(BackendError, match="names no graph"):
        compiled(env, "step 1:")


@pytest.mark.parametrize("kind", ["worker", pytest.param("memory", marks=pytest.mark.slow)])
def test_compilers_that_were_killed_are_fewer_next_time(
    env: dict[str, str], kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    faults(env, kind)
    # A worker that is killed leaves its lock, and the tool ends with 0.
    result, cache = compiled(env, A, B, workers=4, retries=1, grace_s=0.5)
    assert cache.done() == set(result.names) == set(keys(env, A, B))
    said = capfd.readouterr().err
    assert "graphs failed; once more, up to 2 at a time, since compilers were killed" in said


def test_stale_locks_and_old_failures_do_not_stand_in_the_way(env: dict[str, str]) -> None:
    cache = Path(env["NEURON_COMPILE_CACHE_URL"])
    env["NEURON_CC_FLAGS"] = "--model-type=transformer"  # without which the tool skips what failed
    locked, failed = keys(env, A, B)
    for path in add_locked(cache, locked).iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    add_failed(cache, failed)
    assert compiled(env, A, B)[1].done() == {locked, failed}


def test_what_another_process_compiles_is_waited_for(env: dict[str, str]) -> None:
    env[PAUSE] = "0.3"
    jobs = [subprocess.Popen([sys.executable, "-c", _JOB, tool(env)], env=env, cwd=ROOT) for _ in range(2)]
    assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    cache = Cache(Path(env["NEURON_COMPILE_CACHE_URL"]))
    assert [entry.state for entry in cache.entries()] == [EntryState.DONE] * 3


def test_whatever_ends_the_command_ends_its_compilers(env: dict[str, str]) -> None:
    env[PAUSE] = "30"
    job = subprocess.Popen([sys.executable, "-c", _JOB, tool(env)], env=env, cwd=ROOT)
    cache = Path(env["NEURON_COMPILE_CACHE_URL"])
    wait_until(lambda: len(list(cache.glob(f"*/*/{LOCK}"))) == 2 and len(compilers(cache)) == 2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=120) == 128 + signal.SIGTERM
    wait_until(lambda: not compilers(cache))


def test_a_job_that_nohup_started_outlives_its_terminal(env: dict[str, str]) -> None:
    env[PAUSE] = "1"
    job = subprocess.Popen(["nohup", sys.executable, "-c", _JOB, tool(env)], env=env, cwd=ROOT, stdout=subprocess.PIPE)
    cache = Path(env["NEURON_COMPILE_CACHE_URL"])
    wait_until(lambda: bool(list(cache.glob(f"*/*/{LOCK}"))))
    job.send_signal(signal.SIGHUP)
    job.communicate(timeout=120)
    assert job.returncode == 0


_JOB = f"""
import os, sys, tempfile
from pathlib import Path
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.parallel_compile import compile_graphs
command = [sys.executable, "-m", "tests.support.neuron_machine", *{[A, B, C]}]
cache = Cache(Path(os.environ["NEURON_COMPILE_CACHE_URL"]))
found = compile_graphs(sys.argv[1], command, os.environ, cache, Path(tempfile.mkdtemp()), 2, 0)
assert set(found.names) == cache.done(), (found.names, cache.done())
"""


def compilers(cache: Path) -> list[int]:
    from nxtrain.tools.compile.module_folders import naming

    return [pid for entry in cache.glob("*/MODULE_*") for pid in naming(str(entry))]


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
