"""Snapshots of a GPU's memory: of profiled steps, and of a step whose allocation fails."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from nxtrain.backends.base import Backend
from nxtrain.common.run_folder import LOGS_DIR, PROFILES_DIR
from nxtrain.config.check import Resolved
from nxtrain.train import trainer
from nxtrain.train.step import StepResult
from tests.support.models import changed, weights_of
from tests.support.parity import layout, rank_gradient
from tests.support.runs import run_plan, token_file, train_rank

pytestmark = pytest.mark.cuda

TOO_MUCH_BYTES = 1 << 50


def plan(folder: Path, **metrics: Any) -> Resolved:
    data = {"source": "tokens", "path": str(token_file(folder / "rows.npy", num_rows=18))}
    quiet = {"tensorboard": False, "progress": False, **metrics}
    return run_plan(folder / "run", data, steps=6, metrics=quiet, checkpoint={"every": 0})


def snapshot(file: Path) -> dict[str, Any]:
    """Content of a snapshot, which torch writes with Python's own types."""
    result: dict[str, Any] = pickle.loads(file.read_bytes())
    return result


def test_profiled_steps_leave_each_allocation_with_its_stack(backend: Backend, tmp_path: Path) -> None:
    resolved = plan(tmp_path, profile_steps=[3, 4], profile_ranks=[0])
    train_rank(backend, resolved)
    folder = resolved.config.run.dir / LOGS_DIR / PROFILES_DIR
    assert (folder / "rank-00000-steps-3-4.json.gz").stat().st_size > 0
    result = snapshot(folder / "rank-00000-steps-3-4-memory.pickle")
    assert sum(segment["allocated_size"] for segment in result["segments"]) > 0
    traces = [entry for device in result["device_traces"] for entry in device if entry["action"] == "alloc"]
    assert any("nxtrain" in frame["filename"] for entry in traces for frame in entry["frames"])


def test_a_failed_allocation_leaves_a_snapshot_and_names_keys(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*args: Any) -> StepResult:
        torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8, device=backend.device)
        raise AssertionError("the allocation succeeded")

    monkeypatch.setattr(trainer, "train_step", greedy)
    resolved = plan(tmp_path)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        train_rank(backend, resolved)
    logs = resolved.config.run.dir / LOGS_DIR
    said = (logs / "memory-rank-0.txt").read_text(encoding="utf-8")
    assert said.startswith("error: rank 0 is out of memory; it holds parameters ")
    assert "keys that would help: " in said
    assert snapshot(logs / "memory-rank-0.pickle")["segments"]


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_activations_in_host_memory_change_no_bit_and_free_the_memory_of_blocks(backend: Backend, remat: str) -> None:
    result, peaks = {}, {}
    resolved = layout("gqa2", tp=1, params="bf16", remat=remat, config={"num_hidden_layers": 8})
    for offload in ((), ("activations",)):
        torch.cuda.reset_peak_memory_stats()
        run = changed(resolved, parallel={"offload": offload})
        result[offload] = rank_gradient(backend, run, weights_of(resolved))
        peaks[offload] = backend.diagnostics.peak_memory_bytes()
    resident, moved = result.values()
    assert (moved.loss, moved.norm) == (resident.loss, resident.norm)
    for name, shard in resident.shards.items():
        assert torch.equal(moved.shards[name], shard)
    if remat == "none":
        assert peaks["activations",] < peaks[()]
