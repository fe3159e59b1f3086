"""Commands `nxtrain cache ls|verify|sync|clean`; they print results to standard output, progress to standard error."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.io.object_store import open_store
from nxtrain.common.io.paths import is_bucket, local_path
from nxtrain.common.process.document import write_document
from nxtrain.common.process.progress import Progress
from nxtrain.common.text import size
from nxtrain.config.bounds import quoted
from nxtrain.config.cache_dir import LOCKS, cache_folder
from nxtrain.config.load import load
from nxtrain.config.operation_schema import CompileConfig
from nxtrain.tools.compile.cache import OWN, Cache
from nxtrain.tools.compile.entries import NEFF_FOLDER, CacheKey, Entry, EntryState, is_compiler
from nxtrain.tools.compile.sync import Bucket, CacheLocation, sync

_COLORS = {
    EntryState.DONE: "green",
    EntryState.FAILED: "red",
    EntryState.LOCKED: "cyan",
    EntryState.STALE: "yellow",
    EntryState.PENDING: "dim",
}
_GIB = 1 << 30
_SHOWN = 3
"""Maximum number of file names of a folder in an error message."""


def ls(where: str | None, as_json: bool) -> None:
    """Print every entry of a compile cache with its state."""
    cache = _cache(where)
    with _explained(cache):
        entries, quarantined = cache.entries(), cache.quarantined()
    counts = Counter(entry.state for entry in entries)
    size_bytes = sum(entry.size_bytes for entry in (*entries, *quarantined))
    if as_json:
        write_document(
            {
                "folder": str(cache),
                "bytes": size_bytes,
                "counts": {state.value: counts[state] for state in EntryState},
                "entries": [_row(entry) for entry in entries],
                "quarantine": [_row(entry) for entry in quarantined],
            }
        )
        return
    table = Table("state", "compiler", "graph", "size", "last use", "", title=str(cache), box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    table.columns[3].justify = table.columns[4].justify = "right"
    now_s = time.time()
    for entry in entries:
        state = f"[{_COLORS[entry.state]}]{entry.state.value}"
        name = entry.key.compiler.removeprefix("neuronxcc-")
        row = (name, entry.key.module, size(entry.size_bytes), _age(now_s - entry.used_s), entry.detail)
        table.add_row(state, *map(escape, row))
    width = None
    if not sys.stdout.isatty():  # the reader of a file or a pipe has no width to fit
        width = 160
    Console(width=width, highlight=False).print(table)
    words = [f"{counts[state]} {state.value}" for state in EntryState if counts[state]]
    if quarantined:
        words.append(f"{len(quarantined)} in quarantine")
    print(f"{', '.join(words) or 'empty'}; {size(size_bytes)}")
    ways = [f"--{state.value}" for state in (EntryState.FAILED, EntryState.STALE) if counts[state]]
    if ways:
        print(f"to mend: nxtrain cache clean {where or ''} {' '.join(ways)}".replace("  ", " "))


def verify(where: str | None) -> None:
    """Verify the hashes of every compiled entry in a cache, and print the results."""
    cache = _cache(where)
    with _explained(cache):
        verdicts = []
        for verdict in cache.verify():
            verdicts.append(verdict)
            result = "ok"
            if verdict.damage:
                result = f"damaged: {verdict.damage}"
            elif verdict.is_new:
                result = "hashed now"
            print(f"{verdict.key}  {result}")
    damaged = sum(bool(verdict.damage) for verdict in verdicts)
    new = sum(verdict.is_new for verdict in verdicts)
    print(f"{len(verdicts) - damaged - new} as they were sealed, {new} hashed for the first time, {damaged} damaged")
    if damaged:
        raise BackendError(
            f"{damaged} of {len(verdicts)} entries of {cache} were damaged, and are in the cache's quarantine now; "
            "compile them again, or copy them from another cache: nxtrain cache sync SRC DST"
        )


def sync_caches(source: str, target: str) -> None:
    """Copy compiled entries that the target cache lacks, and show progress on a terminal."""
    source_cache = _location(source)
    target_cache = _location(target)
    with _explained(target_cache), Progress("comparing", on_terminals_only=True) as progress:
        report = sync(source_cache, target_cache, progress)
    words = [f"{len(report.copied)} copied ({size(report.size_bytes)})", f"{len(report.present)} there already"]
    if report.busy:
        words.append(f"{len(report.busy)} left to those who work on them")
    print(", ".join(words))
    if report.unusable:
        lines = [f"    {key}: {reason}" for key, reason in report.unusable.items()]
        raise BackendError(
            f"{len(report.unusable)} entries of {source_cache} could not be copied:\n" + "\n".join(lines) + "\n"
            "    for an entry that changed or was removed: sync again; for a damaged entry: delete it in the source, "
            "and copy or compile it there again"
        )


def clean(where: str | None, max_gib: float | None, failed: bool, stale: bool) -> None:
    """Clean a compile cache; without options, break stale locks and quarantine failed entries.

    Args:
        where: Folder or configuration file; None: the default cache.
        max_gib: Evict entries until the cache has at most this size in GiB; None: evict nothing.
        failed: Quarantine entries whose compilation failed.
        stale: Break locks whose process has ended.
    """
    cache = _cache(where)
    if not cache.root.is_dir():
        print(f"{cache} is not there yet: nothing is compiled")
        return
    every = max_gib is None and not failed and not stale
    with _explained(cache):
        cache.sweep()
        # A failed entry may look locked by the process that failed.
        changes: dict[str, Sequence[CacheKey]] = {}
        if stale or every:
            changes["lock broken"] = cache.break_locks()
        if failed or every:
            changes["into quarantine"] = cache.quarantine_failed()
        if max_gib is not None:
            changes["removed"] = cache.evict(int(max_gib * _GIB))
        for change, keys in changes.items():
            for key in keys:
                print(f"{key}  {change}")
        entries, quarantined = cache.entries(), cache.quarantined()
    print(f"{cache} holds {size(sum(entry.size_bytes for entry in (*entries, *quarantined)))}")


def _location(text: str) -> CacheLocation:
    if is_bucket(text):
        return Bucket(open_store(text))
    folder = _folder(text)
    _refuse_other(folder)
    return Cache(folder)


def _cache(where: str | None) -> Cache:
    if where and is_bucket(where):
        raise ConfigError(f"{where} is a bucket; this command works on a folder. Fetch it: nxtrain cache sync SRC DST")
    folder = _folder(where)
    # A run creates the cache folder of its configuration, so a missing folder is an empty cache.
    if not folder.is_dir() and not (where and where.endswith(".toml")):
        raise ConfigError(
            f"{folder} is not a folder; name the folder of a compile cache, or a configuration file. "
            "nxtrain compile makes a cache, and so does: nxtrain cache sync SRC DST"
        )
    _refuse_other(folder)
    return Cache(folder)


def _refuse_other(folder: Path) -> None:
    """Refuse a folder with other files than a compile cache, before any file is written there.

    An empty or missing folder may become a cache.
    """
    if not folder.is_dir():
        return
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise BackendError(f"{folder} cannot be read: {error.strerror}") from error
    has_graphs = any(name == NEFF_FOLDER or is_compiler(name) for name in names)
    others = [name for name in names if name not in (OWN, LOCKS)]
    if others and not has_graphs:
        shown = ", ".join(map(quoted, others[:_SHOWN]))
        if others[_SHOWN:]:
            shown += " and others"
        raise ConfigError(
            f"{folder} is not a cache of compiled graphs: it holds {shown}, and neither neuronxcc-* nor "
            f"{NEFF_FOLDER}; name the folder of a compile cache, a configuration file, or an empty folder"
        )


def _folder(where: str | None) -> Path:
    if where is None:
        return cache_folder(CompileConfig())
    if not where.endswith(".toml"):
        return local_path(where)
    config = load(where).config
    return cache_folder(config.compile, shared=config.backend.name == "neuron-native")


@contextmanager
def _explained(cache: CacheLocation) -> Iterator[None]:
    """Convert file system errors of this context into errors with a message for the user."""
    try:
        yield
    except OSError as error:
        raise BackendError(
            f"{cache}: {error.strerror}: {error.filename}; unfinished entries were not stored, and no entry is "
            "damaged; solve the cause and repeat the command"
        ) from error


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "compiler": entry.key.compiler,
        "module": entry.key.module,
        "state": entry.state.value,
        "bytes": entry.size_bytes,
        "used": datetime.fromtimestamp(entry.used_s, timezone.utc).isoformat(timespec="seconds"),
        "detail": entry.detail,
    }


def _age(seconds: float) -> str:
    for length_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit} ago"
    return "now"
