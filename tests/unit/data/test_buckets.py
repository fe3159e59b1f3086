"""Corpora in S3 give the rows of a local disk; each of their blocks comes to a node once, and from one version."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import boto3
import numpy as np
import pytest
from botocore.exceptions import NoCredentialsError

from nxtrain.common.errors import BackendError, DataError, StorageError
from nxtrain.common.io import cached_object
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.cached_object import CachedObject
from nxtrain.common.io.object_store import BucketSource
from nxtrain.data import Data, Loader, StreamLoader, Streams
from nxtrain.data.arrow import preparation, preparation_request
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.loader import Batch, BatchShare
from nxtrain.data.stream_loader import LaneOrder, LanePosition, Lanes, LocalLanes, num_lanes
from nxtrain.data.workers import WorkerPolicy, Workers
from tests.support.corpora import documents, prepare, write_corpus, write_tokenizer
from tests.support.object_stores import BUCKET, Fault, failing_s3, object_of, s3, s3_variables
from tests.unit.data.conftest import open_at

__all__ = ["s3", "s3_variables"]

BLOCK, GLOBAL_BATCH, SEQ_LEN = 256, 4, 24
KEY = BucketPath(f"s3://{BUCKET}/data/rows.bin")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_object, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(cached_object, "RUN_BLOCKS", 4)
    monkeypatch.setattr(cached_object, "_RESERVE_BYTES", 0)


@pytest.fixture
def content(s3: Any) -> bytes:
    result = Random(0).randbytes(41 * BLOCK + 7)
    put(s3, result)
    return result


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """First and last byte of every range that is requested from now on."""
    results: list[tuple[int, int]] = []
    read = BucketSource.read

    def counted(self: Any, view: memoryview, start: int) -> int:
        results.append((start, start + len(view)))
        return read(self, view, start)

    monkeypatch.setattr(BucketSource, "read", counted)
    return results


def put(s3: Any, content: bytes, address: BucketPath = KEY) -> None:
    s3.put_object(**object_of(address), Body=content)


def span(source: CachedObject, start: int, size: int) -> bytes:
    view = memoryview(bytearray(size))
    return bytes(view[: source.read(view, start)])


def drawn_spans(seed: int, size: int, number: int) -> Iterator[tuple[int, int]]:
    random = Random(seed)
    for _ in range(number):
        yield random.randrange(size + BLOCK), random.choice((0, 1, 16, BLOCK, 3 * BLOCK, 11 * BLOCK))


@pytest.mark.parametrize("seed", range(4))
def test_drawn_reads_are_those_of_the_object_and_each_block_comes_once(
    content: bytes, requests: list[tuple[int, int]], tmp_path: Path, seed: int
) -> None:
    first, second = (CachedObject(KEY, tmp_path / "cache") for _ in range(2))
    for number, (start, size) in enumerate(drawn_spans(seed, len(content), 30)):
        assert span((first, second)[number % 2], start, size) == content[start : start + size]
    blocks = Counter(block for start, stop in requests for block in range(start // BLOCK, -(-stop // BLOCK)))
    assert set(blocks.values()) == {1}, "two processes of a node, and one request for a block"
    assert max(stop - start for start, stop in requests) <= 4 * BLOCK
    requests.clear()
    third = CachedObject(KEY, tmp_path / "cache")
    for start, size in drawn_spans(seed, len(content), 30):
        assert span(third, start, size) == content[start : start + size]
    assert not requests, "the next start reads this node's disk"


def test_threads_that_read_the_same_place_make_one_request(
    content: bytes, requests: list[tuple[int, int]], tmp_path: Path
) -> None:
    source = CachedObject(KEY, tmp_path)
    together = threading.Barrier(8)

    def read(_: int) -> bytes:
        together.wait()
        return span(source, 5 * BLOCK + 3, 2 * BLOCK)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(8))) == {content[5 * BLOCK + 3 : 7 * BLOCK + 3]}
    assert requests == [(5 * BLOCK, 8 * BLOCK)]


@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_the_disk_loses_are_fetched_again(content: bytes, tmp_path: Path, seed: int) -> None:
    """Also those of a kill between a block and its checksum, and of a torn index."""
    span(CachedObject(KEY, tmp_path), 0, len(content))
    random = Random(seed)
    for path in tmp_path.iterdir():
        damaged = bytearray(path.read_bytes())
        for _ in range(3):
            place = random.randrange(len(damaged))
            damaged[place : place + 8] = random.choice((bytes(8), random.randbytes(8)))[: len(damaged) - place]
        path.write_bytes(damaged)
    assert span(CachedObject(KEY, tmp_path), 0, len(content)) == content


def test_another_version_is_never_mixed_with_the_first(s3: Any, content: bytes, tmp_path: Path) -> None:
    old = CachedObject(KEY, tmp_path)
    assert span(old, 0, BLOCK) == content[:BLOCK]
    put(s3, content[::-1])
    new = CachedObject(KEY, tmp_path)
    assert span(new, 0, len(content)) == content[::-1]
    assert span(old, 0, BLOCK) == content[:BLOCK]
    with pytest.raises(Exception, match="another version has taken its place"):
        span(old, 9 * BLOCK, 1)
    assert len([*tmp_path.iterdir()]) == 2, "files of the first version are deleted"
    s3.delete_object(**object_of(KEY))
    assert span(new, 0, len(content)) == content[::-1], "what this node has"


def test_a_full_disk_costs_requests_and_ends_no_run(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = CachedObject(KEY, tmp_path)
    span(source, 0, BLOCK)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    for start, size in drawn_spans(1, len(content), 10):
        assert span(source, start, size) == content[start : start + size]
    told = capsys.readouterr().err
    assert told.count("WARNING") == 1
    assert "cannot be cached on this node: No space left" in told


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus as one file and as shards, its ids, a tokenizer, and rows of ids."""
    folder = tmp_path_factory.mktemp("corpora")
    source, tokenizer = write_corpus(folder, "a.jsonl", documents(60)), write_tokenizer(folder / "tokenizer")
    prepare(source, out=folder / "text.arrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "BATCH_BYTES", 500)
        patch.setattr(preparation_request, "MIN_SHARD_BYTES", 1)
        prepare(source, out=folder / "shards.arrow", shard_bytes=2000)
    prepare(source, out=folder / "ids.arrow", tokenizer=tokenizer)
    np.save(folder / "rows.npy", np.random.default_rng(0).integers(0, 300, (400, SEQ_LEN + 1)).astype(np.uint16))
    return folder


@pytest.fixture
def bucket(s3: Any, corpora: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cached_object, "BLOCK_BYTES", 8 * BLOCK)
    for path in corpora.rglob("*"):
        if path.is_file():
            s3.upload_file(str(path), BUCKET, f"c/{path.relative_to(corpora).as_posix()}")
    return f"s3://{BUCKET}/c"


def opened(folder: Path, corpora: Path, root: str, name: str, **keys: Any) -> Data:
    source = {"source": "tokens" if name.endswith(".npy") else "arrow", "tokenizer": str(corpora / "tokenizer")}
    config = {**source, "path": f"{root}/{name}", "cache_dir": folder / "cache", **keys}
    return open_at(folder / "work", seq_len=SEQ_LEN, validation_rows=4, **config)


def batches(
    data: Data,
    number: int,
    workers: int = 0,
    positions: list[LanePosition] | None = None,
    opened: Callable[[], None] = lambda: None,
) -> list[Batch]:
    """First batches from some positions on; `opened` is called when this process has opened all files."""
    share = BatchShare(GLOBAL_BATCH, 2)
    if not isinstance(data.source, Streams):
        loader = Loader(data.train, share, seed=3, shuffle=True)
        opened()
        return [loader.batch(step) for step in range(number)]
    source, order = data.source.source, LaneOrder(num_lanes(GLOBAL_BATCH), 3, True)
    policy = WorkerPolicy(workers, 0, 60.0)

    def open_lanes(positions: Any, rows_per_lane: int) -> Lanes:
        if workers:
            opened()
            return Workers(source, order, policy, positions, rows_per_lane)
        open_lane = source.opened()
        opened()
        return LocalLanes(lambda lane, position: open_lane(order, lane, position), positions, rows_per_lane)

    item = StreamLoader(open_lanes, order.lanes, share, end_id=0, positions=positions or ())
    result = item.prefetched(0)
    try:
        return list(islice(result, number))
    finally:
        result.close()
        if positions is not None:
            positions[:] = [item.cursor()[lane] for lane in range(order.lanes)]


def listed(result: list[Batch]) -> list[Any]:
    return [(batch.inputs.tolist(), batch.targets.tolist()) for batch in result]


@pytest.mark.parametrize(
    ("name", "keys", "workers"),
    [
        ("text.arrow", {}, 0),
        ("text.arrow", {"packing": "best_fit", "validation_fraction": 0.2}, 1),
        ("shards.arrow", {}, 0),
        ("ids.arrow", {"tokenizer": ""}, 0),
        ("rows.npy", {}, 0),
    ],
)
def test_a_bucket_gives_the_rows_of_a_disk(
    corpora: Path, bucket: str, tmp_path: Path, name: str, keys: dict[str, Any], workers: int
) -> None:
    ours, theirs = (
        opened(tmp_path, corpora, bucket, name, **keys),
        opened(tmp_path / "2", corpora, f"{corpora}", name, **keys),
    )
    assert listed(batches(ours, 8, workers)) == listed(batches(theirs, 8))
    if ours.validation is not None and theirs.validation is not None:
        rows = np.arange(theirs.validation.num_rows)
        assert ours.validation.rows(rows).tolist() == theirs.validation.rows(rows).tolist()
    if name.endswith(".arrow"):
        assert ours.fingerprint == theirs.fingerprint, "a run may move between a disk and a bucket"


def test_a_mixture_and_an_evaluation_may_lie_in_a_bucket(corpora: Path, bucket: str, tmp_path: Path) -> None:
    results = []
    for root in (bucket, str(corpora)):
        mixed = {"path": "", "mixture": (f"{root}/text.arrow", f"{root}/ids.arrow")}
        data = opened(tmp_path / root[-3:], corpora, root, "", **mixed, validation_path=f"{root}/shards.arrow")
        assert data.validation is not None
        results.append((listed(batches(data, 6)), data.validation.rows(np.arange(2)).tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize(("packing", "stop"), [("concat", 4), ("best_fit", 7)])
def test_the_rows_go_on_as_they_would_have_though_the_cache_is_gone(
    corpora: Path, bucket: str, tmp_path: Path, packing: str, stop: int
) -> None:
    data = opened(tmp_path, corpora, bucket, "text.arrow", packing=packing)
    straight = listed(batches(data, 12))
    positions: list[LanePosition] = []
    before = batches(data, stop, positions=positions)
    fresh = opened(tmp_path / "fresh", corpora, bucket, "text.arrow", packing=packing)
    assert listed(before) + listed(batches(fresh, 12 - stop, positions=positions)) == straight


def test_opening_a_bucket_reads_metadata_only(
    s3: Any, tmp_path: Path, requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_object, "BLOCK_BYTES", 1 << 10)
    texts = ["snow " * 9000 for _ in range(40)]
    monkeypatch.setattr(preparation, "BATCH_BYTES", 200_000)
    prepare(write_corpus(tmp_path, "a.jsonl", texts), out=tmp_path / "o.arrow")
    address = BucketPath(f"s3://{BUCKET}/o.arrow")
    s3.upload_file(str(tmp_path / "o.arrow"), BUCKET, "o.arrow")
    corpus = PreparedCorpus(address, tmp_path / "cache")
    assert 8 * sum(stop - start for start, stop in requests) < (tmp_path / "o.arrow").stat().st_size
    assert corpus.text(23) == texts[23]


def test_an_object_that_was_damaged_on_its_way_is_refused(s3: Any, corpora: Path, bucket: str, tmp_path: Path) -> None:
    content = (corpora / "ids.arrow").read_bytes()
    place = PreparedCorpus(corpora / "ids.arrow")._batches[0].values + 5
    damaged = content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
    s3.put_object(Bucket=BUCKET, Key="c/ids.arrow", Body=damaged)
    corpus = PreparedCorpus(BucketPath(f"{bucket}/ids.arrow"), tmp_path / "cache")
    with pytest.raises(DataError, match=rf"{bucket}/ids\.arrow is damaged: bytes .* documents 0 to "):
        corpus.content(0)


def gone(s3: Any, key: str) -> None:
    s3.delete_object(Bucket=BUCKET, Key=key)


def replaced(s3: Any, key: str) -> None:
    s3.put_object(Bucket=BUCKET, Key=key, Body=b"other")


@pytest.mark.parametrize(("change", "says"), [(gone, "it is absent"), (replaced, "another version has taken")])
@pytest.mark.parametrize(("name", "workers"), [("text.arrow", 0), ("text.arrow", 1), ("rows.npy", 0)])
def test_an_object_that_changes_under_a_run_ends_it_with_its_address(
    s3: Any,
    corpora: Path,
    bucket: str,
    tmp_path: Path,
    change: Callable[[Any, str], None],
    says: str,
    name: str,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cached_object, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("nxtrain.data.samples._HEADER_BYTES", 128)
    data = opened(tmp_path, corpora, bucket, name, shuffle=False)
    if workers:  # a worker opens the object itself, at its start
        says = "does not exist" if change is gone else "is not an Arrow file|another corpus"
    with pytest.raises(DataError, match=f"{bucket}/{name}.*({says})"):
        batches(data, 60, workers, opened=lambda: change(s3, f"c/{name}"))


@pytest.mark.parametrize("workers", [0, 1])
def test_faults_of_ranges_change_no_row_of_a_worker_or_end_it_with_the_address(
    corpora: Path,
    bucket: str,
    tmp_path: Path,
    s3_variables: dict[str, str],
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker is not a rank's thread: its error comes to the rank, and no replacement hides the fault."""
    theirs = listed(batches(opened(tmp_path / "2", corpora, f"{corpora}", "text.arrow"), 8))
    faults: list[Fault] = []
    with failing_s3(s3_variables, lambda: faults.pop(0) if faults else "") as variables:
        monkeypatch.setenv("AWS_ENDPOINT_URL", variables["AWS_ENDPOINT_URL"])
        data = opened(tmp_path, corpora, bucket, "text.arrow")
        for name, actual in (("torn", ["torn", "error", ""]), ("down", ["error"] * 99)):
            assert isinstance(data.source, Streams)
            source = replace(data.source.source, cache=tmp_path / name)  # type: ignore[type-var]
            item = replace(data, source=replace(data.source, source=source))
            faults[:] = actual  # type: ignore[assignment]
            if name == "torn":
                assert listed(batches(item, 8, workers)) == theirs
                assert not faults
            else:
                with pytest.raises(StorageError, match=f"{bucket}/text.arrow: .*start again when it does"):
                    batches(item, 8, workers)


def test_mistakes_are_named(
    s3: Any, corpora: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=f"{bucket}/none.arrow does not exist"):
        opened(tmp_path, corpora, bucket, "none.arrow")
    with pytest.raises(DataError, match=f"{bucket}/none.npy does not exist"):
        opened(tmp_path, corpora, bucket, "none.npy")
    s3.delete_object(Bucket=BUCKET, Key="c/shards.arrow/00001.arrow")
    with pytest.raises(DataError, match=f"{bucket}/shards.arrow holds . shards of"):
        opened(tmp_path, corpora, bucket, "shards.arrow")
    s3.put_object(Bucket=BUCKET, Key="c/bad.npy", Body=(corpora / "rows.npy").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"bad\.npy is cut short"):
        opened(tmp_path, corpora, bucket, "bad.npy")
    s3.put_object(Bucket=BUCKET, Key="c/bad.arrow", Body=(corpora / "text.arrow").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"bad\.arrow is not an Arrow file, is damaged or is cut short"):
        opened(tmp_path, corpora, bucket, "bad.arrow")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir: .*file/cache cannot hold blocks"):
        opened(tmp_path, corpora, bucket, "text.arrow", cache_dir=tmp_path / "file" / "cache")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # remembers credentials
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BackendError, match="Unable to locate credentials") as refused:
        opened(tmp_path / "3", corpora, bucket, "text.arrow")
    assert isinstance(refused.value.__cause__, NoCredentialsError)
