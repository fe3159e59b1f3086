"""Compilation of a run's graphs by repeated calls of `neuron_parallel_compile`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nxtrain.common.errors import BackendError
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.entries import LOG, CacheKey, Entry, EntryState
from nxtrain.tools.compile.tool import (
    TOOL,
    Names,
    compile_times,
    log_file,
    names_in,
    read_log,
    run_tool,
    stages_in,
    tool_argv,
)

OUT_OF_MEMORY = "[F137]"
"""Text in the compiler's log if a subprocess was killed, mostly for lack of memory."""

_POLL_S = 1.0


@dataclass(frozen=True)
class Compiled:
    """Result of compiling a run's graphs, all of which are in the cache.

    Args:
        names: Part of the run that uses each graph, in the order of extraction.
        seconds: Compile time of each new graph in seconds; None if it was not measured.
        stages: Pipeline stages of this machine's ranks; empty if it holds all of them.
    """

    names: Names
    seconds: Mapping[CacheKey, float | None]
    stages: tuple[int, ...] = ()


def compile_graphs(
    tool: str,
    command: Sequence[str],
    env: Mapping[str, str],
    cache: Cache,
    logs: Path,
    num_workers: int,
    retries: int,
) -> Compiled:
    """Compile every graph that a command records, store their hashes, and wait for graphs that other processes compile.

    If compilers were killed, the next attempt uses half as many workers.

    Args:
        tool: Path of `neuron_parallel_compile`.
        command: Command line of the run whose graphs are extracted.
        env: Environment variables of the command.
        logs: Folder for the logs of each attempt.
        num_workers: Compiler processes at a time.
        retries: Further attempts for graphs that failed.

    Raises:
        BackendError: Some graphs could not be compiled.
    """
    names: Names = {}
    seconds: dict[CacheKey, float | None] = {}
    for attempt in range(retries + 1):
        # The tool would wait for stale locks, and skip failed entries.
        cache.sweep()
        for key in cache.break_locks():
            print_line(f"broke the lock of {key}, whose owner is gone")
        for key in cache.quarantine_failed():
            print_line(f"put {key} aside, which failed before")
        folder = logs / str(attempt)
        folder.mkdir()
        count = _GraphCount(cache, folder)
        status = run_tool(tool_argv(tool, num_workers, folder, command), env, folder, count.show)
        log = read_log(folder)
        names = {**names_in(log), **names}
        times = compile_times(folder)
        seconds |= times or {}
        _check_command(status, has_compiled=times is not None, has_graphs=bool(names_in(log)), log=log_file(folder))
        _await_others(cache, names)
        for verdict in cache.verify(names):
            if verdict.damage:
                print_line(f"{verdict.key} was damaged, and is in quarantine: {verdict.damage}")
        lacking = {key: cache.entry(key) for key in names.keys() - cache.done()}
        if not lacking:
            return Compiled(names, seconds, stages_in(log))
        if attempt < retries:
            why = ""
            if any(map(_was_killed, lacking.values())):
                num_workers = max(1, num_workers // 2)
                why = ", since compilers were killed, which is mostly for want of memory"
            print_line(f"{len(lacking)} of {len(names)} graphs failed; once more, up to {num_workers} at a time{why}")
    raise BackendError(_report(names, lacking, log_file(folder)))


def print_line(line: str) -> None:
    """Print a line of `nxtrain compile` on standard error, between the lines of the tool."""
    print(f"nxtrain compile: {line}", file=sys.stderr, flush=True)


class _GraphCount:
    """Progress output: prints the number of compiled graphs."""

    def __init__(self, cache: Cache, folder: Path) -> None:
        self._cache, self._folder = cache, folder
        self._began = time.monotonic()
        self._printed = ""

    def show(self) -> None:
        """Print the number of compiled graphs if it has changed."""
        names = names_in(read_log(self._folder))
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


def _check_command(status: int, *, has_compiled: bool, has_graphs: bool, log: Path) -> None:
    where = f"its output is above, and in {log}"
    if status == 1 and not has_compiled:
        raise BackendError(f"the run that extracts the graphs failed, so no graph was compiled; {where}")
    if status > 0 and not has_compiled:
        raise BackendError(f"{TOOL} ended with exit status {status} before it compiled a graph; {where}")
    if not has_graphs:
        hint = "Neuron's plugin names graphs at its log level INFO"
        raise BackendError(f"the log of the run names no graph (exit status {status}); {hint}; {where}")


def _await_others(cache: Cache, names: Names) -> None:
    """Wait for graphs that other processes compile, and break their locks if these become stale."""
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
    """Return True if a compiler process ended without a result, or its log reports that it was killed."""
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
