"""Entries travel between nodes whole or not at all, through folders and through S3 behind a real HTTP server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.object_store import BucketStore, open_store
from nxtrain.common.process.progress import Progress
from nxtrain.tools.compile.cache import Cache, UnusableEntryError
from nxtrain.tools.compile.entries import DONE, LOCK, NEFF, CacheKey, Entry, Seal
from nxtrain.tools.compile.sync import Bucket, CacheLocation, sync
from tests.support.caches import add_done, add_failed, add_locked, add_pending, key, neff
from tests.support.object_stores import BUCKET, s3, s3_variables

__all__ = ["s3", "s3_variables"]

PREFIX = "llama/7b"


def bucket_at(address: str) -> Bucket:
    return Bucket(open_store(address))


@pytest.fixture
def node(tmp_path: Path) -> Cache:
    """A node's cache with one entry of each state."""
    cache = Cache(tmp_path / "node", grace_s=0.0)
    add_done(cache.root, key(1))
    add_done(cache.root, key(2, "xyz"))
    add_failed(cache.root, key(3))
    add_locked(cache.root, key(4))
    add_pending(cache.root, key(5))
    return cache


@pytest.fixture(params=["folder", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> CacheLocation:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return Bucket(open_store(f"s3://{BUCKET}/{PREFIX}"))
    return Cache(tmp_path / "shared")


DONE_KEYS = [key(1), key(2, "xyz")]


def contents(cache: Cache, of: CacheKey) -> dict[str, bytes]:
    folder = cache.root / of.compiler / of.module
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "nxtrain.json"}


def test_what_is_done_reaches_another_node_byte_for_byte_and_nothing_else_does(
    node: Cache, shared: CacheLocation, tmp_path: Path
) -> None:
    other = Cache(tmp_path / "other")
    assert (sync(node, shared).copied, sync(shared, other).copied) == (DONE_KEYS, DONE_KEYS)
    assert [entry.key for entry in other.entries()] == DONE_KEYS
    for of in DONE_KEYS:
        assert contents(other, of) == contents(node, of)
    assert [(verdict.damage, verdict.is_new) for verdict in other.verify()] == [("", False)] * 2
    assert not list((other.root / ".nxtrain" / "staging").iterdir())


def test_a_second_sync_copies_what_is_new_only(node: Cache, shared: CacheLocation) -> None:
    sync(node, shared)
    add_done(node.root, key(6))
    progress = Progress("comparing")
    report = sync(node, shared, progress)
    size = node.size_bytes(key(6))
    assert (report.copied, report.present, report.size_bytes) == ([key(6)], DONE_KEYS, size)
    assert progress.total == size
    assert progress.line().startswith(f"entry 1 of 1  {key(6).module}: 100%, ")


def test_an_entry_damaged_at_the_source_is_not_taken(node: Cache, shared: CacheLocation) -> None:
    list(node.verify())
    folder = node.root / key(1).compiler / key(1).module
    (folder / NEFF).write_bytes(neff(key(9)))
    report = sync(node, shared)
    assert (report.copied, list(report.unusable)) == ([key(2, "xyz")], [key(1)])
    assert report.unusable[key(1)].startswith("damaged: model.neff has SHA-256")
    assert shared.done() == {key(2, "xyz")}


def test_an_entry_that_changes_while_it_is_read_is_not_taken(
    node: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = node.root / key(1).compiler / key(1).module
    target = tmp_path / "target"
    target.mkdir()
    look = node.entry

    def touch_and_look(of: CacheKey) -> Entry | None:
        os.utime(folder / NEFF)
        return look(of)

    monkeypatch.setattr(node, "entry", touch_and_look)
    with pytest.raises(UnusableEntryError, match="changed while it was copied"):
        node.fetch(key(1), target)
    monkeypatch.undo()
    (folder / DONE).unlink()
    with pytest.raises(UnusableEntryError, match="removed while it was copied"):
        node.fetch(key(1), target)


def test_what_a_neighbour_works_on_is_left_to_him(node: Cache, tmp_path: Path) -> None:
    other = Cache(tmp_path / "other", grace_s=3600)
    add_locked(other.root, key(1))
    report = sync(node, other)
    assert (report.copied, report.busy) == ([key(2, "xyz")], [key(1)])
    assert (other.root / key(1).compiler / key(1).module / LOCK).exists()


def test_in_a_bucket_an_entry_shows_only_once_all_its_files_are_there(node: Cache, s3: Any) -> None:
    class Torn(BucketStore):
        def put(self, name: str, content: bytes) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync(node, Bucket(Torn(BucketPath(f"s3://{BUCKET}/{PREFIX}"))))
    assert any("/objects/" in item["Key"] for item in s3.list_objects_v2(Bucket=BUCKET)["Contents"])
    assert bucket_at(f"s3://{BUCKET}/{PREFIX}").done() == set()


def test_two_nodes_with_different_builds_of_a_graph_leave_one_whole_entry(node: Cache, s3: Any, tmp_path: Path) -> None:
    """A NEFF holds the time of its build, so that two nodes never make the same bytes."""
    second = Cache(tmp_path / "second")
    (add_done(second.root, key(1)) / NEFF).write_bytes(b"built elsewhere")
    bucket = bucket_at(f"s3://{BUCKET}/{PREFIX}")
    folders: dict[str, tuple[Path, Seal]] = {}
    for name, cache in (("a", node), ("b", second)):
        (tmp_path / name).mkdir()
        folders[name] = tmp_path / name, cache.fetch(key(1), tmp_path / name)
    for name in "aba":  # as if both had found the bucket without it
        bucket.store(key(1), *folders[name])
    third = Cache(tmp_path / "third")
    assert sync(bucket, third).copied == [key(1)]
    assert contents(third, key(1)) == contents(node, key(1))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"torn", "damaged: model.neff has 4 bytes"),
        (None, f"damaged: s3://{BUCKET}/{PREFIX}/objects/"),
        ("rotten", "has SHA-256"),
    ],
    ids=["cut short", "missing", "changed"],
)
def test_an_object_that_is_not_what_it_should_be_is_not_taken(
    node: Cache, s3: Any, tmp_path: Path, body: bytes | str | None, reason: str
) -> None:
    bucket, other = bucket_at(f"s3://{BUCKET}/{PREFIX}"), Cache(tmp_path / "other")
    sync(node, bucket)
    listed = json.loads(s3.get_object(Bucket=BUCKET, Key=f"{PREFIX}/entries/{key(1)}.json")["Body"].read())
    name = f"{PREFIX}/objects/{listed['files'][NEFF]['sha256']}"
    if body is None:
        s3.delete_object(Bucket=BUCKET, Key=name)
    else:
        s3.put_object(Bucket=BUCKET, Key=name, Body=neff(key(9)) if body == "rotten" else body)
    report = sync(bucket, other)
    assert report.copied == [key(2, "xyz")]
    assert reason in report.unusable[key(1)]
    assert other.done() == {key(2, "xyz")}


@pytest.mark.parametrize(
    "files",
    [
        {"../../escape": {"size_bytes": 0, "sha256": "0" * 64}},
        {NEFF: {"size_bytes": 0, "sha256": "../../x"}, DONE: {"size_bytes": 0, "sha256": "0" * 64}},
        {NEFF: {"size_bytes": 0, "sha256": "0" * 64}},
        [],
    ],
)
def test_a_list_of_files_that_leads_elsewhere_or_lacks_some_is_not_believed(
    s3: Any, tmp_path: Path, files: object
) -> None:
    body = json.dumps({"files": files}).encode()
    s3.put_object(Bucket=BUCKET, Key=f"{PREFIX}/entries/{key(1)}.json", Body=body)
    s3.put_object(Bucket=BUCKET, Key=f"{PREFIX}/entries/neuronxcc-2/../../MODULE_1.json", Body=body)
    report = sync(bucket_at(f"s3://{BUCKET}/{PREFIX}/"), Cache(tmp_path / "other"))
    assert "is not a list of files" in report.unusable[key(1)]
    assert len(report.unusable) == 1


def test_prefixes_do_not_see_each_other(node: Cache, s3: Any) -> None:
    sync(node, bucket_at(f"s3://{BUCKET}/a"))
    assert bucket_at(f"s3://{BUCKET}/a").done() == set(DONE_KEYS)
    assert (bucket_at(f"s3://{BUCKET}/aa").done(), bucket_at(f"s3://{BUCKET}").done()) == (set(), set())


@pytest.mark.usefixtures("s3")
def test_places_that_cannot_be_are_refused(node: Cache, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are both buckets"):
        sync(Bucket(open_store("s3://a")), Bucket(open_store("s3://b")))
    with pytest.raises(ConfigError, match="are the same folder"):
        sync(node, Cache(Path(f"{node.root}/../node")))
    with pytest.raises(ConfigError, match="is not a folder"):
        sync(Cache(tmp_path / "absent"), node)
    with pytest.raises(ConfigError, match="names no bucket"):
        open_store("s3://")
