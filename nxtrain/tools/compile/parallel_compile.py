"""Compilation of a run's graphs in repeated calls of the compiler's tool."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nxtrain.common.errors import BackendError
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.entries import LOG, CacheKey, Entry, EntryState
from nxtrain.tools.compile.memory import num_killed
from nxtrain.tools.compile.tool import TOOL, Names, ToolOutcome, run_tool, tool_argv

OUT_OF_MEMORY = "[F137]"
"""Mark in the compiler's log for a killed subprocess, mostly for want of memory."""

_POLL_S = 1.0


@dataclass(frozen=True)
class CompileJob:
    """Compilation job.

    Args:
        tool: The program `neuron_parallel_compile`.
        command: Command that shows the graphs.
        env: Environment variables of the command.
        cache: Cache of this node.
    """

    tool: str
    command: Sequence[str]
    env: Mapping[str, str]
    cache: Cache


@dataclass(frozen=True)
class Compiled:
    """Graphs of which a run can load each.

    Args:
        names: What they compute, in the order in which they were met.
        seconds: What compilation took of those that were not there before.
        stages: The pipeline stages of this machine's ranks; empty if it holds all of them.
    """

    names: Names
    seconds: Mapping[CacheKey, float]
    stages: tuple[int, ...] = ()


def compile_graphs(job: CompileJob, num_workers: int, retries: int) -> Compiled:
    """Compile and seal every graph, and wait for graphs that other processes compile.

    Args:
        job: What.
        num_workers: Compilers at a time; half as many after some were killed.
        retries: Times that what failed is tried again.

    Raises:
        BackendError: The command failed or showed no graph, or graphs could not be compiled.
    """
    folder = Path(tempfile.mkdtemp(prefix="nxtrain-compile-"))
    names, seconds = Names(), dict[CacheKey, float]()
    for attempt in range(retries + 1):
        _mend(job.cache)
        attempt_folder = folder / str(attempt)
        attempt_folder.mkdir()
        killed_before = num_killed()
        argv = tool_argv(job.tool, num_workers, attempt_folder, job.command)
        outcome = run_tool(argv, job.env, attempt_folder, _GraphCount(job.cache))
        names = {**outcome.names, **names}
        seconds |= outcome.seconds
        _refuse_failed_command(outcome)
        _await_others(job.cache, names)
        for verdict in job.cache.verify(names):
            if verdict.damage:
                print_line(f"{verdict.key} was damaged, and is in quarantine: {verdict.damage}")
        lacking = {key: job.cache.entry(key) for key in names.keys() - job.cache.done()}
        if not lacking:
            shutil.rmtree(folder)
            return Compiled(names, seconds, outcome.stages)
        if attempt < retries:
            starved = num_killed() > killed_before or any(map(_was_killed, lacking.values()))
            why = ""
            if starved:
                num_workers = max(1, num_workers // 2)
                why = ", since compilers were killed, which is mostly for want of memory"
            print_line(f"{len(lacking)} of {len(names)} graphs failed; once more, up to {num_workers} at a time{why}")
    raise BackendError(_report(names, lacking, outcome.log))


def print_line(line: str) -> None:
    """Print a line between those of the tool."""
    print(f"nxtrain compile: {line}", file=sys.stderr, flush=True)


class _GraphCount:
    """Printer of the number of compiled graphs, whenever it has changed."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._began = time.monotonic()
        self._printed = ""

    def __call__(self, names: Names) -> None:
        entries = [self._cache.entry(key) for key in names]
        states = [entry.state for entry in entries if entry is not None]
        done = states.count(EntryState.DONE)
        failed = states.count(EntryState.FAILED)
        line = f"{done} of {len(names)} graphs done"
        if failed:
            line += f", {failed} failed"
        if done + failed and line != self._printed:
            self._printed = line
            print_line(f"{line}, {time.monotonic() - self._began:.0f} s")


def _mend(cache: Cache) -> None:
    """Remove stale locks and failed entries, which would make the tool wait or skip."""
    cache.sweep()
    for key in cache.break_locks():
        print_line(f"broke the lock of {key}, whose owner is gone")
    for key in cache.quarantine_failed():
        print_line(f"put {key} aside, which failed before")


def _refuse_failed_command(outcome: ToolOutcome) -> None:
    where = f"its lines are above, and in {outcome.log}"
    if outcome.status == 1 and not outcome.compiled:
        raise BackendError(f"the run that shows the graphs failed, so that nothing was compiled; {where}")
    if outcome.status > 0 and not outcome.compiled:
        raise BackendError(f"{TOOL} ended with exit status {outcome.status} before it compiled anything; {where}")
    if not outcome.names:
        hint = "Neuron's plugin names them at its log level INFO"
        raise BackendError(f"the run showed no graph (exit status {outcome.status}); {hint}; {where}")


def _await_others(cache: Cache, names: Names) -> None:
    """Wait for graphs that others compile; a lock that nobody works under goes stale meanwhile, and is broken."""
    num_printed = 0
    while True:
        entries = [cache.entry(key) for key in names]
        locked = [entry.key for entry in entries if entry is not None and entry.state is EntryState.LOCKED]
        if not locked:
            break
        if len(locked) != num_printed:
            num_printed = len(locked)
            print_line(f"waiting for {num_printed} graphs that another process has locked, such as {locked[0]}")
        time.sleep(_POLL_S)
    cache.break_locks()


def _was_killed(entry: Entry | None) -> bool:
    """True if a compiler ended without a result, or its log reports that it was killed."""
    if entry is None or entry.state is not EntryState.FAILED:
        return True
    log = entry.folder / LOG
    return log.exists() and OUT_OF_MEMORY in log.read_text(encoding="utf-8", errors="replace")


def _report(names: Names, lacking: Mapping[CacheKey, Entry | None], log: Path) -> str:
    lines = [f"{len(lacking)} of {len(names)} graphs could not be compiled:"]
    for key, name in names.items():
        if key in lacking:
            entry = lacking[key]
            verdict = "its compiler was killed"
            if entry is not None and entry.state is EntryState.FAILED:
                verdict = f"{entry.detail}; see {entry.folder / LOG}"
            lines.append(f"{name} ({key.module}): {verdict}")
    lines.append(f"what was printed is above, and that of the run in {log}")
    if any(map(_was_killed, lacking.values())):
        lines.append("for want of memory: fewer --workers, or a machine with more of it")
    return "\n    ".join(lines)
