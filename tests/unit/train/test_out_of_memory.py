"""Report of a rank without memory: what it counts, what it advises, and which errors it knows."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend, CpuDiagnostics
from nxtrain.config.check import Resolved
from nxtrain.train.build import build_model, build_state, mesh_of
from nxtrain.train.context import RunContext
from nxtrain.train.health.out_of_memory import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    PLANNED,
    advice,
    explaining_memory,
    held_bytes,
    is_out_of_memory,
)
from nxtrain.train.step import train_step
from nxtrain.train.step_profiler import StepProfiler
from tests.support.models import plan
from tests.support.parity import local_batch
from tests.support.ranks import RankPool, ranks

__all__ = ["ranks"]


def test_failed_allocations_are_known_behind_other_errors() -> None:
    results = []
    for allocate in (lambda: torch.empty(1 << 60), lambda: bytearray(1 << 62)):
        try:
            try:
                allocate()
            except Exception as error:
                raise RuntimeError("stage 1 failed") from error
        except RuntimeError as error:
            results.append(is_out_of_memory(error))
    assert results == [True, True]
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: failed to allocate"))
    assert not is_out_of_memory(ValueError("memory is fine"))


UPDATES = [
    ({"params": "fp32", "update": "fp32"}, 4, 8),
    ({"params": "bf16", "update": "fp32_master"}, 2, 12),
    ({"params": "bf16", "update": "bf16_kahan"}, 2, 10),
    ({"params": "bf16", "update": "bf16_stochastic", "state": "bf16"}, 2, 4),
]


def counted(backend: Backend, resolved: Resolved) -> tuple[dict[str, int], int, int]:
    """Bytes by kind after a step and one more backward pass, and the entries of the parameters and of ZeRO's rows."""
    mesh = mesh_of(resolved, backend)
    state = build_state(resolved, build_model(resolved, backend, mesh, init="draw"), backend, mesh)
    rows = torch.zeros(2, resolved.config.train.seq_len + 1, dtype=torch.int64)
    train_step(state, local_batch(state, rows, 1), 1e-3)
    state.lm.loss(rows[:1, 1:], rows[:1, 1:]).backward()
    entries = sum(p.numel() for p in state.model.parameters())
    return held_bytes(state, resolved), entries, sum(s.numel() for s in state.data_parallel.shards.values())


@pytest.mark.parametrize(("precision", "param_size", "state_size"), UPDATES)
@pytest.mark.parametrize(("world", "shard"), [(1, "none"), (2, "zero1")])
def test_bytes_by_kind_are_those_of_the_types(
    ranks: RankPool, precision: dict[str, str], param_size: int, state_size: int, world: int, shard: str
) -> None:
    """ZeRO-1 holds its rows of the parameters apart."""
    parallel = {"tp": 1, "dp": world, "shard": shard}
    train = {"global_batch": 2, "micro_batch": 1}
    resolved = plan("gqa2", parallel=parallel, precision=precision, train=train)
    held, entries, rows = ranks.run(world, counted, resolved)[0]
    assert held[PARAMETERS] == param_size * entries
    # Of one micro-batch, in the type of the parameters; wider sums of a step are given away by its reduction.
    assert held[GRADIENTS] >= param_size * entries * (1 if world == 1 else 0)
    apart = 0 if shard == "none" else param_size
    assert held[OPTIMIZER] == (state_size + apart) * rows
    assert held[PLANNED] > 0


KEYS = st.fixed_dictionaries(
    {
        "micro_batch": st.sampled_from([1, 4]),
        "remat": st.sampled_from(["none", "selective", "full"]),
        "shard": st.sampled_from(["none", "zero1", "full"]),
        "sp": st.booleans(),
        "activations": st.sampled_from([1, 10**9]),
    }
)


@given(KEYS, st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.booleans())
def test_advice_changes_something_and_begins_with_the_largest_kind(
    keys: dict[str, Any], dp: int, tp: int, on_host: bool
) -> None:
    parallel = {"shard": keys["shard"], "sequence_parallel": keys["sp"] and tp > 1, "tp": tp, "dp": dp}
    train = {"micro_batch": keys["micro_batch"], "global_batch": 8, "remat": keys["remat"]}
    resolved = plan("gqa2", parallel=parallel, train=train)
    held = {PARAMETERS: 1000, GRADIENTS: 1000, OPTIMIZER: 1000, PLANNED: keys["activations"]}
    backend = "cpu" if on_host else "cuda"
    result = advice(resolved, held, backend=backend, dp=dp, tp=tp, on_host=on_host)
    assert f"train.loss_chunk_mib={32 if on_host else 1024}: fewer logits at once" in result
    advised = {line.partition("=")[0] for line in result}
    assert ("train.micro_batch" in advised) is (keys["micro_batch"] > 1)
    assert ("train.remat" in advised) is (keys["remat"] != "full")
    assert ("parallel.shard" in advised) is (dp > 1 and keys["shard"] != "full")
    assert ("parallel.offload" in advised) is (keys["shard"] == "full" and not on_host)
    assert ("parallel.sequence_parallel" in advised) is (tp > 1 and not keys["sp"])
    of_activations = [line.startswith(("train.", "parallel.sequence_parallel")) for line in result]
    assert of_activations == sorted(of_activations, reverse=keys["activations"] > 3000)


class Snapshots(CpuDiagnostics):
    """Measurements of a CPU that pretends to write snapshots as a GPU does."""

    watched = False

    def watch_memory(self) -> None:
        self.watched = True

    def dump_memory(self, file: Path) -> bool:
        file.write_bytes(pickle.dumps({"segments": []}))
        return True


def test_a_pretended_gpu_leaves_a_snapshot_at_the_error_and_after_profiled_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    backend, snapshots = CpuBackend(), Snapshots()
    backend.diagnostics = snapshots
    resolved = plan("gqa2", run={"dir": tmp_path}, parallel={"tp": 1, "dp": 1})
    context = RunContext.open(backend, resolved)
    state = build_state(resolved, build_model(resolved, backend, context.mesh, init="draw"), backend, context.mesh)
    with pytest.raises(torch.OutOfMemoryError), explaining_memory(context, state):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert pickle.loads((tmp_path / "logs" / "memory-rank-0.pickle").read_bytes()) == {"segments": []}
    said = (tmp_path / "logs" / "memory-rank-0.txt").read_text(encoding="utf-8")
    assert "error: rank 0 is out of memory; it holds parameters " in said
    assert "optimizer state " in said
    assert "keys that would help: " in said
    assert said in capfd.readouterr().err
    with pytest.raises(ValueError, match="other"), explaining_memory(context, state):
        raise ValueError("other")
    assert not capfd.readouterr().err
    profiler = StepProfiler(1, 1, tmp_path, 0, lambda line: None, backend)
    profiler.enter(1, "training")
    profiler.finish(1)
    assert snapshots.watched
    assert [path.name for path in (tmp_path / "profiles").glob("*.pickle")] == ["rank-00000-steps-1-1-memory.pickle"]
