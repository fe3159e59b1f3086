"""Checkpoints in the background: one at a time, of the state as it was, and a failure costs nothing but itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.checkpoint import async_writer, directory, staging
from nxtrain.checkpoint.async_writer import CheckpointWriter, Destination, SaveOutcome
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.save import write_state
from nxtrain.checkpoint.staging import Staged
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from tests.support.run_folders import meta

ONE = Ranks(Mesh(1, 0))
CUT = Layout(ParamTable({"a.weight": ShardSpec((4, 2), dim=0)}), Mesh(1, 0))


class HeldWrites:
    """Lets writes through one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Semaphore(0)

        def write(*args: object) -> object:
            assert self.gate.acquire(timeout=60)
            return write_state(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(async_writer, "write_state", write)


def make(folder: Path, *, background: bool = True) -> CheckpointWriter:
    destination = Destination(folder, StorageScope(ONE), Retention(3))
    return CheckpointWriter(destination, CUT, ONE, background=background)


def saves(saver: CheckpointWriter) -> list[SaveOutcome]:
    return [outcome for outcome in saver.poll() if isinstance(outcome, SaveOutcome)]


def stored(folder: Path, step: int) -> torch.Tensor:
    read = torch.full((4, 2), -1.0)
    load(directory.step_path(folder, step), {"model": {"a.weight": read}}, CUT)
    return read


def test_what_is_written_is_the_state_as_it_was_and_not_as_it_became(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWrites(monkeypatch)
    saver, weight = make(tmp_path), torch.ones(4, 2)
    saver.save(lambda: {"model": {"a.weight": weight}}, meta(1))
    weight.fill_(7)
    assert directory.newest(tmp_path) is None
    assert saver.poll() == []
    held.gate.release()
    saver.settle()
    assert torch.equal(stored(tmp_path, 1), torch.ones(4, 2))
    assert [(outcome.step, outcome.problem) for outcome in saves(saver)] == [(1, "")]


def test_a_second_one_is_left_out_while_the_first_is_written_unless_it_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWrites(monkeypatch)
    saver, weight = make(tmp_path), torch.ones(4, 2)

    def state() -> dict[str, dict[str, torch.Tensor]]:
        return {"model": {"a.weight": weight}}

    saver.save(state, meta(1))
    weight.fill_(2)
    saver.save(state, meta(2))
    outcomes = saves(saver)
    assert [outcome.problem for outcome in outcomes] == ["the one before it is still being written"]
    threading.Timer(0.2, held.gate.release, (2,)).start()
    saver.save(state, meta(3), wait=True)
    assert [directory.step_of(path) for path in directory.list_checkpoints(tmp_path)] == [1, 3]
    assert torch.equal(stored(tmp_path, 1), torch.ones(4, 2))
    assert [outcome.step for outcome in outcomes + saves(saver)] == [2, 1, 3]


def test_a_failure_is_told_and_the_next_one_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, weight = make(tmp_path), torch.ones(4, 2)
    broken = True

    def publish(staged: Path, path: Path, really: Callable[[Path, Path], None] = directory.publish) -> None:
        if broken:
            raise OSError(28, "No space left on device")
        really(staged, path)

    monkeypatch.setattr(directory, "publish", publish)
    saver.save(lambda: {"model": {"a.weight": weight}}, meta(1))
    saver.settle()
    assert "No space left" in saves(saver)[0].problem
    assert list(tmp_path.iterdir()) == []
    broken = False
    saver.save(lambda: {"model": {"a.weight": weight}}, meta(2), after_failure=False)
    assert list(tmp_path.iterdir()) == []
    saver.save(lambda: {"model": {"a.weight": weight}}, meta(2))
    saver.settle()
    assert directory.newest(tmp_path) == directory.step_path(tmp_path, 2)


def test_what_cannot_be_read_back_is_put_aside_and_nothing_older_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, weight = make(tmp_path, background=False), torch.ones(4, 2)
    for step in (1, 2, 3):
        saver.save(lambda: {"model": {"a.weight": weight}}, meta(step))

    def publish(staged: Path, path: Path, really: Callable[[Path, Path], None] = directory.publish) -> None:
        file = staged / "rank-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        really(staged, path)

    monkeypatch.setattr(directory, "publish", publish)
    saver.save(lambda: {"model": {"a.weight": weight}}, meta(4))
    assert "is quarantined" in saves(saver)[-1].problem
    assert [directory.step_of(path) for path in directory.list_checkpoints(tmp_path)] == [1, 2, 3]
    assert [path.name for path in directory.quarantined(tmp_path)] == ["step-00000004.corrupt"]


@pytest.mark.parametrize("broken", ["mark_verified", "steps_to_delete", "point_to"])
def test_what_fails_once_it_is_there_costs_no_checkpoint_and_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    saver, weight = make(tmp_path, background=False), torch.ones(4, 2)
    for step in (1, 2, 3):
        saver.save(lambda: {"model": {"a.weight": weight}}, meta(step))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, broken, full)
    saver.save(lambda: {"model": {"a.weight": weight}}, meta(4))
    outcomes = saves(saver)
    assert outcomes[-1].problem == ""
    (failed,) = outcomes[-1].untidy
    assert "No space left" in failed
    left = [directory.step_of(path) for path in directory.list_checkpoints(tmp_path)]
    assert left == ([1, 2, 3, 4] if broken == "steps_to_delete" else [2, 3, 4])


def test_a_mistake_of_ours_is_no_problem_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = make(tmp_path)

    def broken(*args: object) -> None:
        raise TypeError("ours")

    monkeypatch.setattr("nxtrain.checkpoint.async_writer.write_state", broken)
    saver.save(lambda: {"model": {"a.weight": torch.ones(4, 2)}}, meta(1))
    with pytest.raises(TypeError, match="ours"):
        saver.settle()


def test_the_copy_uses_the_same_memory_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()

    def note(path: Path, staged: Staged, *rest: object) -> None:
        seen.extend(tensor.data_ptr() for tensor in staged.tensors.values())

    monkeypatch.setattr("nxtrain.checkpoint.async_writer.write_state", note)
    saver = make(tmp_path)
    for step in (1, 2, 3):
        saver.save(lambda: {"model": {"a.weight": torch.ones(4, 2)}}, meta(step), wait=True)
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_a_copy_that_does_not_fit_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line tells so; the files are those of copies, and once memory is free the copies come back."""
    free, weight = 31, torch.randn(4, 2)

    def state() -> dict[str, dict[str, torch.Tensor]]:
        return {"model": {"a.weight": weight}}

    monkeypatch.setattr(async_writer, "free_memory_bytes", lambda: free)
    saver = make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(staging, "aligned_memory", mock.Mock(side_effect=AssertionError("no copy is made")))
        for step in (1, 2):
            saver.save(state, meta(step))
            (outcome,) = saves(saver)  # it has ended
            assert (outcome.step, outcome.problem) == (step, "")
            assert ("the copy of a checkpoint takes" in outcome.note) is (step == 1)
            assert torch.equal(stored(tmp_path, step), weight)
    free = 32
    held = HeldWrites(monkeypatch)
    saver.save(state, meta(3))
    assert saver.poll() == []
    held.gate.release()
    saver.settle()
    assert [outcome.note for outcome in saves(saver)] == [""]
    first, last = (directory.step_path(tmp_path, step) / "rank-00000.safetensors" for step in (1, 3))
    assert first.read_bytes() == last.read_bytes()


@given(
    machine=st.integers(0, 1 << 40),
    limit=st.none() | st.integers(0, 1 << 40),
    used=st.integers(0, 1 << 40),
    files=st.integers(0, 1 << 30),
)
def test_free_memory_is_that_of_the_container_if_that_is_less(
    tmp_path_factory: pytest.TempPathFactory, machine: int, limit: int | None, used: int, files: int
) -> None:
    folder = tmp_path_factory.mktemp("memory")
    assert async_writer.free_memory_bytes(folder, folder) == sys.maxsize
    (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {machine} kB\n")
    (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"file 7\ninactive_file {files}\nactive_file 3\n")
    wanted = 1024 * machine if limit is None else min(1024 * machine, limit - used + files)
    assert async_writer.free_memory_bytes(folder, folder) == wanted
