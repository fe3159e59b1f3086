"""Copies of checkpoints in a folder and in S3: whole or absent, verified, kept by the same rules, in nobody's way."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nxtrain.checkpoint import directory, rewinds
from nxtrain.checkpoint.async_writer import CheckpointWriter, Destination, SaveOutcome
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.mirror import Mirror, choice_of, locate_checkpoint, open_mirrored
from nxtrain.checkpoint.mirror_uploads import MirrorUploader, UploadDeadline, UploadOutcome
from nxtrain.checkpoint.rewinds import Rewind, RunHistory
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import BackendError, CheckpointError, ConfigError, DamagedError
from nxtrain.common.io import checksummed_file
from nxtrain.common.io import s3 as s3_client
from nxtrain.common.io.checksummed_file import TransferCounter, transferred
from nxtrain.common.io.object_store import FolderStore, ObjectStore, location_of, open_store
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from tests.support.object_stores import BUCKET, drop_bucket, s3, s3_variables
from tests.support.run_folders import meta

__all__ = ["s3", "s3_variables"]

ONE = Ranks(Mesh(1, 0))
SHAPE = (4, 2)
FILE = "rank-00000.safetensors"
WRITE = checksummed_file.ChecksummedWriter.write


@pytest.fixture(params=["folder", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://{BUCKET}/runs/a"
    return str(tmp_path / "mirror")


class MirroredRun:
    """A run of one rank, whose weight is the number of its step."""

    def __init__(
        self, folder: Path, store: ObjectStore, *, shape: tuple[int, int] = SHAPE, keep: int = 3, keep_every: int = 0
    ) -> None:
        self.folder, self.mirror, self.outcomes = folder, Mirror(store), list[SaveOutcome]()
        self.cut = Layout(ParamTable({"a.weight": ShardSpec(shape, dim=0)}), Mesh(1, 0))
        self.shape = shape
        self.copied = list[tuple[int, str]]()
        retention = Retention(keep, keep_every)
        self.uploader = MirrorUploader(self.mirror, retention, ONE)
        destination = Destination(folder, StorageScope(ONE), retention)
        self.saver = CheckpointWriter(destination, self.cut, ONE, uploader=self.uploader)

    def poll(self) -> None:
        """Keep what has ended."""
        for outcome in self.saver.poll():
            if isinstance(outcome, SaveOutcome):
                self.outcomes.append(outcome)
            else:
                self.copied.append((outcome.step, outcome.problem))

    def save(self, *steps: int) -> None:
        for step in steps:
            weight = torch.arange(step, step + self.shape[0] * self.shape[1]).reshape(self.shape).float()
            self.saver.save(lambda weight=weight: {"model": {"a.weight": weight}}, meta(step))  # type: ignore[misc]
            self.saver.drain(UploadDeadline(60.0))
            self.poll()

    @property
    def unmirrored(self) -> str:
        """Reason for which the mirror lacks the last checkpoint."""
        return self.copied[-1][1]

    def load(self, *places: Any) -> tuple[torch.Tensor, list[DamagedError]]:
        read, damaged = torch.full(self.shape, -1.0), list[DamagedError]()
        first, *fallbacks = places
        load(first, {"model": {"a.weight": read}}, self.cut, fallbacks=fallbacks, on_damage=damaged.append)
        return read, damaged

    def flip(self, step: int) -> None:
        file = directory.step_path(self.folder, step) / FILE
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


def counted(client: Any, operation: str, act: Callable[[], None] = lambda: None) -> list[str]:
    """Notes every request of a kind, and acts before it is sent."""
    seen = list[str]()

    def note(request: Any, **_: Any) -> None:
        seen.append(request.headers.get("Range", b"").decode() or request.url)
        act()

    client.meta.events.register(f"before-send.s3.{operation}", note)
    return seen


def test_a_copy_is_the_checkpoint_byte_for_byte_and_loads(address: str, tmp_path: Path) -> None:
    run = MirroredRun(tmp_path / "run", open_store(address))
    run.save(1)
    assert [outcome.problem for outcome in run.outcomes] == [""]
    assert run.copied == [(1, "")]
    local, copied = directory.step_path(run.folder, 1), locate_checkpoint(address)
    assert locate_checkpoint(str(copied)) == copied == location_of(address) / local.name
    for name in (FILE, directory.MANIFEST, directory.META):
        assert (copied / name).read_bytes() == (local / name).read_bytes()
    assert torch.equal(run.load(copied)[0], torch.arange(1.0, 9.0).reshape(SHAPE))


def test_meta_comes_last_and_without_it_there_is_no_checkpoint(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(address)
    run, put = MirroredRun(tmp_path / "run", store), store.put
    run.save(1)

    def cut_off(name: str, content: bytes) -> None:
        if name.endswith(directory.META):
            raise OSError(5, "the machine stops here")
        put(name, content)

    monkeypatch.setattr(store, "put", cut_off)
    run.save(2)
    assert "cannot copy step-00000002" in run.unmirrored
    assert f"step-00000002/{FILE}" in store.sizes()
    assert f"step-00000002/{directory.MANIFEST}" in store.sizes()
    assert run.mirror.steps() == [1]
    assert locate_checkpoint(address).name == "step-00000001"
    monkeypatch.undo() if address.startswith("/") else monkeypatch.setattr(store, "put", put)
    run.save(3)
    assert run.mirror.steps() == [1, 3]
    assert not [name for name in store.sizes() if name.startswith("step-00000002/")], "leftovers go with the next one"


@pytest.mark.parametrize(
    ("keep", "keep_every", "stay"),
    [(1, 0, [5, 6]), (3, 0, [4, 5, 6]), (1, 3, [3, 5, 6])],
    ids=["two-always", "keep", "keep-every"],
)
def test_the_mirror_keeps_by_the_same_rules(
    address: str, tmp_path: Path, keep: int, keep_every: int, stay: list[int]
) -> None:
    run = MirroredRun(tmp_path / "run", open_store(address), keep=keep, keep_every=keep_every)
    run.save(*range(1, 7))
    assert run.mirror.steps() == stay
    assert {name.partition("/")[0] for name in open_store(address).sizes()} == {f"step-{step:08d}" for step in stay}


def test_a_copy_counts_although_older_ones_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MirroredRun(tmp_path / "run", FolderStore(tmp_path / "mirror"), keep=1)
    run.save(1, 2)

    def refused(names: object) -> None:
        raise PermissionError(13, "Permission denied", "step-00000001")

    monkeypatch.setattr(run.mirror.store, "delete", refused)
    run.saver.save(lambda: {"model": {"a.weight": torch.ones(SHAPE)}}, meta(3))
    run.saver.drain(UploadDeadline(60.0))
    (outcome,) = [outcome for outcome in run.saver.poll() if isinstance(outcome, UploadOutcome)]
    assert (outcome.step, outcome.problem) == (3, "")
    assert outcome.untidy == f"cannot delete in {tmp_path}/mirror: step-00000001: Permission denied"
    assert run.mirror.steps() == [1, 2, 3]


def test_what_is_saved_again_replaces_its_copy_with_all_its_files(address: str, tmp_path: Path) -> None:
    store = open_store(address)
    MirroredRun(tmp_path / "run", store).save(1)
    store.put("step-00000001/rank-00001.safetensors", b"of a run with more ranks")
    MirroredRun(tmp_path / "run", store).save(1)
    assert {name for name in store.sizes() if "rank-" in name} == {f"step-00000001/{FILE}"}


def test_what_became_damaged_on_the_disk_is_not_copied(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = MirroredRun(tmp_path / "run", open_store(address))
    run.save(1)
    begin = run.mirror.begin

    def decay(step: int) -> None:
        begin(step)
        run.flip(step)

    monkeypatch.setattr(run.mirror, "begin", decay)
    run.save(2)
    assert f"{FILE} is damaged" in run.unmirrored
    assert run.mirror.steps() == [1]


def test_a_damaged_or_absent_local_file_is_read_from_the_copy(address: str, tmp_path: Path) -> None:
    run = MirroredRun(tmp_path / "run", open_store(address))
    run.save(1)
    local, copied = directory.step_path(run.folder, 1), run.mirror.folder(1)
    expected, damaged = run.load(local, copied)
    assert damaged == []
    run.flip(1)
    with pytest.raises(DamagedError, match=f"{FILE} is damaged: bytes 0 to"):
        run.load(local)
    read, damaged = run.load(local, copied)
    assert torch.equal(read, expected)
    assert [error.file for error in damaged] == [local / FILE]
    (local / FILE).unlink()
    read, damaged = run.load(local, copied)
    assert torch.equal(read, expected)
    assert "absent" in str(damaged[0])


def test_a_copy_that_was_put_aside_is_taken_no_more_and_stays(address: str, tmp_path: Path) -> None:
    run = MirroredRun(tmp_path / "run", open_store(address), keep=9)
    run.save(1, 2)
    aside = run.mirror.quarantine(2)
    run.save(3)
    assert (run.mirror.steps(), run.mirror.quarantined()) == ([1, 3], [aside])
    assert f"step-00000002/{FILE}" in open_store(address).sizes()


def test_only_a_newer_copy_that_was_lost_is_warned_of(address: str, tmp_path: Path) -> None:
    run = MirroredRun(tmp_path / "run", open_store(address), keep=9)
    run.save(1, 2, 3, 4)
    run.mirror.abandon(3)
    assert choice_of(address, locate_checkpoint(address)) == ""
    run.mirror.quarantine(3)
    open_store(address).delete(["step-00000002/meta.json"])
    chosen = locate_checkpoint(address)
    assert chosen == run.mirror.folder(1)
    lost = "step-00000002, step-00000003 is incomplete or damaged"
    assert choice_of(address, chosen) == f"WARNING: step-00000001 is not the newest: {lost}"
    assert choice_of(str(chosen), chosen) == ""


def test_what_a_run_went_back_from_is_neither_taken_nor_damaged_and_stays(address: str, tmp_path: Path) -> None:
    run = MirroredRun(tmp_path / "run", open_store(address), keep=9)
    run.save(1, 2, 3)
    aside = run.mirror.quarantine(2)
    assert run.mirror.abandon(1) == [3]
    assert (run.mirror.steps(), run.mirror.quarantined()) == ([1], [aside])
    assert run.mirror.abandon(1, damaged=True) == []
    assert (run.mirror.steps(), run.mirror.quarantined()) == ([1], [])
    run.save(4)
    assert {f"step-0000000{step}/{FILE}" for step in (1, 2, 3, 4)} <= open_store(address).sizes().keys()
    run.save(3)
    assert run.mirror.steps() == [1, 3, 4]
    assert "step-00000003/meta.abandoned.json" not in open_store(address).sizes()


@pytest.mark.parametrize("location", [".", "prefix"])
def test_a_record_is_whole_or_damaged(s3: Any, tmp_path: Path, location: str) -> None:
    kept = RunHistory(run="a", run_dir="/b", returns=(Rewind(told="never", job="7", keeps=0), Rewind(told="")))
    store = FolderStore(tmp_path) if location == "." else open_store(f"s3://{BUCKET}/{location}")
    assert rewinds.read(store.root) is None
    store.put(rewinds.FILE, kept.sealed())
    assert rewinds.read(store.root) == kept
    for at in range(0, len(kept.sealed()), 7):
        flipped = bytearray(kept.sealed())
        flipped[at] ^= 1
        store.put(rewinds.FILE, bytes(flipped))
        try:
            assert rewinds.read(store.root) == kept, "but for white space"
        except DamagedError as error:
            assert str(store.root / rewinds.FILE) in str(error)


def test_only_the_blocks_that_are_needed_are_fetched(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksummed_file, "BLOCK_BYTES", 4096)
    run = MirroredRun(tmp_path / "run", open_store(f"s3://{BUCKET}/x"), shape=(4096, 2))
    run.save(1)
    folder: Any = run.mirror.folder(1)
    fetched = counted(folder.service.client, "GetObject")
    half = Layout(run.cut.table, Mesh.build(2, 1, tp=2))
    read = torch.zeros(2048, 2)
    load(folder, {"model": {"a.weight": read}}, half)
    assert read[0, 0] == 1 + 4096
    ranges = [request for request in fetched if request.startswith("bytes=")]
    assert len(ranges) == 4, "16 KiB of 32, which begin behind the block of the header"


def test_a_file_of_several_parts_arrives(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MirroredRun(tmp_path / "run", open_store(f"s3://{BUCKET}/x"), shape=(2_500_000, 2))
    folder: Any = run.mirror.folder(1)
    parts = counted(folder.service.client, "UploadPart")
    monkeypatch.setattr(s3_client, "transferred", sent := TransferCounter())
    run.save(1)
    assert sent() >= 4 * 2 * 2_500_000, "what is sent is a sign of life"
    assert run.unmirrored == ""
    assert len(parts) == 2
    assert torch.equal(run.load(folder)[0], run.load(directory.step_path(run.folder, 1))[0])


def test_a_bucket_that_is_gone_costs_the_copy_only_and_the_next_is_tried(s3: Any, tmp_path: Path) -> None:
    run = MirroredRun(tmp_path / "run", open_store(f"s3://{BUCKET}/x"))
    drop_bucket(s3)
    run.save(1)
    assert (run.outcomes[-1].problem, "NoSuchBucket" in run.unmirrored) == ("", True)
    assert f"s3://{BUCKET}/x" in run.unmirrored
    assert directory.newest(run.folder) == directory.step_path(run.folder, 1)
    s3.create_bucket(Bucket=BUCKET)
    run.save(2)
    assert run.unmirrored == ""
    assert run.mirror.steps() == [2]


def test_a_folder_that_is_full_costs_the_copy_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MirroredRun(tmp_path / "run", FolderStore(tmp_path / "mirror"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nxtrain.common.io.object_store.ChecksummedWriter.write", full)
    monkeypatch.setattr(
        "nxtrain.checkpoint.shard_files.ChecksummedWriter",
        type("Free", (checksummed_file.ChecksummedWriter,), {"write": WRITE}),
    )
    run.save(1)
    assert (run.outcomes[-1].problem, "No space left" in run.unmirrored) == ("", True)
    assert [path for path in (tmp_path / "mirror").rglob("*") if path.is_file()] == []


@pytest.mark.alone
def test_a_slow_mirror_holds_nobody_up(s3: Any, tmp_path: Path) -> None:
    run = MirroredRun(tmp_path / "run", open_store(f"s3://{BUCKET}/x"))
    folder: Any = run.mirror.folder(1)
    counted(folder.service.client, "PutObject", lambda: time.sleep(0.5))  # S3's answers, late
    began = time.monotonic()
    run.saver.save(lambda: {"model": {"a.weight": torch.ones(SHAPE)}}, meta(1))
    assert time.monotonic() - began < 0.4
    while directory.newest(run.folder) is None:
        time.sleep(0.01)
    run.saver.settle()
    run.poll()
    assert run.outcomes[-1].problem == "", "the checkpoint counts before its copy does"
    assert run.outcomes[-1].write_s < 0.4
    assert run.mirror.steps() == []
    run.saver.drain(UploadDeadline(60.0))
    run.poll()
    assert time.monotonic() - began > 3 * 0.5, "three objects: the rank's, the manifest and meta.json"
    assert run.copied == [(1, "")]
    assert run.mirror.steps() == [1]


def test_a_mirror_that_hangs_costs_no_checkpoint_and_what_it_reads_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = MirroredRun(tmp_path / "run", FolderStore(tmp_path / "mirror"), keep=1)
    add, gate = run.mirror.add, threading.Event()

    def held(*args: Any) -> None:
        assert gate.wait(20)
        add(*args)

    def local() -> list[int]:
        return [directory.step_of(path) for path in directory.list_checkpoints(run.folder)]

    def save(step: int) -> None:
        run.saver.save(lambda: {"model": {"a.weight": torch.ones(SHAPE)}}, meta(step))
        run.saver.settle()
        run.poll()

    monkeypatch.setattr(run.mirror, "add", held)
    for step in range(1, 7):
        save(step)
    assert [outcome.problem for outcome in run.outcomes] == [""] * 6
    assert local() == [1, 5, 6]
    began = time.monotonic()
    assert not run.uploader.drain(UploadDeadline(0.3), ONE)
    assert 0.3 < time.monotonic() - began < 3.0
    gate.set()
    assert run.uploader.drain(UploadDeadline(20.0), ONE)
    run.poll()
    assert [step for step, problem in run.copied if not problem] == [1, 6], "the newest takes the place of others"
    assert [step for step, problem in run.copied if "took too long" in problem] == [2, 3, 4, 5]
    assert run.mirror.steps() == [1, 6]
    save(7)
    assert local() == [6, 7]


def test_the_end_waits_for_a_mirror_while_bytes_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MirroredRun(tmp_path / "run", FolderStore(tmp_path / "mirror"))
    add, alive = run.mirror.add, list[float]()

    def slowly(*args: Any) -> None:
        for _ in range(10):
            time.sleep(0.15)
            transferred.note(1)
        add(*args)

    monkeypatch.setattr(run.mirror, "add", slowly)
    run.saver.save(lambda: {"model": {"a.weight": torch.ones(SHAPE)}}, meta(1))
    run.saver.settle()
    assert not run.uploader.drain(UploadDeadline(1.0, 0.3), ONE), "in all"
    stopping = UploadDeadline(1.0, after_stop_s=0.1)
    assert not run.uploader.drain(stopping, ONE, stop_requested=lambda: True), "asked to stop meanwhile"
    run.saver.drain(UploadDeadline(1.0), lambda: alive.append(time.monotonic()))
    run.poll()
    assert run.copied == [(1, "")]
    assert max(after - before for before, after in pairwise(alive)) < 1.0


def test_what_cannot_be_a_mirror_is_told_before_the_first_step(s3: Any, tmp_path: Path) -> None:
    def reach(address: str) -> None:
        open_mirrored(address, tmp_path / "run", Ranks(Mesh(1, 0)), 0)

    with pytest.raises(BackendError, match=r"s3://absent/x: .*NoSuchBucket.*aws s3 ls s3://absent/"):
        reach("s3://absent/x")
    with pytest.raises(ConfigError, match="names no bucket"):
        reach("s3:///x")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot use checkpoint.mirror=.*/file: rank 0: .*Not a directory"):
        reach(str(tmp_path / "file"))
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"/link and .*/run are the same folder, .* another checkpoint.mirror"):
        reach(str(tmp_path / "link"))
    reach(f"s3://{BUCKET}/x")
    assert "Contents" not in s3.list_objects_v2(Bucket=BUCKET)
    assert list((tmp_path / "run").iterdir()) == []


def test_without_boto3_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "boto3":
            raise ImportError(name)
        return find(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(BackendError, match=r"pip install 'nxtrain\[s3\]'"):
        open_store("s3://a/b")
