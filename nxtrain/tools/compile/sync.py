"""Sync of compiled graphs: from a node to a shared folder or a bucket, and from there to other nodes.

Done entries that the target lacks are copied, complete and verified, or not at all. Nothing is deleted or overwritten.
Any number of nodes may sync at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.object_store import open_store
from nxtrain.common.io.paths import local_path
from nxtrain.common.io.s3 import SCHEME
from nxtrain.tools.compile.bucket import Bucket
from nxtrain.tools.compile.cache import Cache, UnusableEntryError
from nxtrain.tools.compile.entries import CacheKey

CacheLocation = Cache | Bucket


@dataclass
class Report:
    """Result of a sync."""

    copied: list[CacheKey] = field(default_factory=list)
    size_bytes: int = 0
    present: list[CacheKey] = field(default_factory=list)
    busy: list[CacheKey] = field(default_factory=list)
    unusable: dict[CacheKey, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Progress of a sync."""

    key: CacheKey
    num_done: int
    num_total: int
    bytes_done: int
    bytes_total: int


def open_place(text: str | Path) -> CacheLocation:
    """Open the cache at an address: `s3://bucket/prefix`, or a folder."""
    address = str(text)
    if address.startswith(SCHEME):
        return Bucket(open_store(address))
    return Cache(local_path(address))


def sync(source: CacheLocation, target: CacheLocation, on_step: Callable[[Step], None] = lambda _: None) -> Report:
    """Copy every done entry that the target lacks."""
    if isinstance(source, Bucket) and isinstance(target, Bucket):
        raise ConfigError(f"{source} and {target} are both buckets; one must be a folder, or use: aws s3 sync")
    if isinstance(source, Cache) and not source.root.is_dir():
        raise ConfigError(f"{source} is no folder; a cache is made by compiling, or by a sync into it")
    if isinstance(source, Cache) and isinstance(target, Cache) and source.root.resolve() == target.root.resolve():
        raise ConfigError(f"{source} and {target} are the same folder")
    wanted, there = source.done(), target.done()
    report = Report(present=sorted(wanted & there))
    sizes = {key: source.size_bytes(key) for key in sorted(wanted - there)}
    bytes_done, bytes_total = 0, sum(sizes.values())
    for num_done, (key, size_bytes) in enumerate(sizes.items(), start=1):
        try:
            if _copy(source, target, key):
                report.copied.append(key)
                report.size_bytes += size_bytes
            else:
                report.busy.append(key)
        except UnusableEntryError as error:
            report.unusable[key] = str(error)
        bytes_done += size_bytes
        on_step(Step(key, num_done, len(sizes), bytes_done, bytes_total))
    return report


def _copy(source: CacheLocation, target: CacheLocation, key: CacheKey) -> bool:
    """Copy an entry by way of a folder next to the target, or next to the source if the target is a bucket."""
    cache = target
    if isinstance(target, Bucket):
        cache = source
    assert isinstance(cache, Cache)
    with cache.staging() as folder:
        return target.store(key, folder, source.fetch(key, folder))
