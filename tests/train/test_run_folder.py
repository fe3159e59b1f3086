"""Files in a run's folder, and the run repeated from them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.cli import main as cli
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from nxtrain.train import trainer
from nxtrain.train.build import build_model
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import StepResult, TrainState, train_step
from tests.support.ranks import RankPool
from tests.support.runs import GLOBAL_BATCH, SEQ_LEN, course, records, run_plan, token_file, train_rank

RECORD = {"step", "loss", "grad_norm", "param_norm", "lr", "tokens", "tokens_per_s", "step_time_s", "mfu"}
"""Keys that scripts rely on; more may be there."""


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str | bool]:
    return {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", num_rows=24)), "shuffle": False}


def test_a_run_leaves_its_configuration_metrics_checkpoints_and_curves(
    tmp_path: Path, data: dict[str, str | bool]
) -> None:
    folder = tmp_path / "run"
    resolved = run_plan(
        folder,
        data,
        steps=12,
        checkpoint={"every": 5, "keep": 2, "async": False},
        metrics={"log_every": 4, "tensorboard": True, "progress": False},
    )
    train_rank(CpuBackend(), resolved)
    assert load(folder / "config.toml").config == resolved.config
    assert [path.name for path in sorted((folder / "checkpoints").glob("step-*"))] == [
        *("step-00000010", "step-00000012")
    ]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    lines = records(folder)
    # The first, every fourth, those of checkpoints, the last.
    assert [line["step"] for line in lines] == [1, 4, 5, 8, 10, 12]
    for line in lines:
        assert line.keys() >= RECORD
        assert line["tokens"] == line["step"] * GLOBAL_BATCH * SEQ_LEN
        assert line["lr"] <= resolved.config.optim.lr
        assert 0 <= line["lost_update_frac"] < 0.1  # parameters are float32, and the rate is not small
        assert min(line["loss"], line["grad_norm"], line["param_norm"], line["tokens_per_s"], line["step_time_s"]) > 0


def test_the_configuration_in_the_folder_gives_the_run_again(
    tmp_path: Path, data: dict[str, str | bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = run_plan(tmp_path / "first", data, steps=3, run={"seed": 5})
    train_rank(CpuBackend(), resolved)
    config = tmp_path / "first" / "config.toml"
    assert resolve_config(load(config), 1).model == resolved.model
    monkeypatch.setattr(sys, "argv", ["nxtrain", "train", str(config), f"run.dir={tmp_path / 'again'}"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (None, 0)
    assert course(tmp_path / "again") == course(tmp_path / "first")


def test_step_k_trains_on_the_rows_that_the_contract_says(tmp_path: Path, data: dict[str, str | bool]) -> None:
    """With a rate of 0 the loss of step k is that of rows [k * global_batch, (k + 1) * global_batch) untrained."""
    backend = CpuBackend()
    resolved = run_plan(tmp_path / "run", data, steps=8, optim={"lr": 0.0, "min_lr": 0.0})
    train_rank(backend, resolved)
    model = build_model(resolved, backend, Mesh.build(1, 0), init="draw")
    rows = torch.from_numpy(np.load(str(data["path"])).astype(np.int64))
    for step, record in enumerate(course(tmp_path / "run")):
        batch = rows[torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH) % len(rows)]
        logits = model.logits(batch[:, :-1])  # type: ignore[operator]
        expected = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        assert record["loss"] == pytest.approx(expected.item(), abs=1e-6)


def batches_of(backend: Backend, resolved: Resolved) -> list[DeviceBatch]:
    """Batches of this rank in the steps of a run."""
    seen: list[DeviceBatch] = []

    def seeing(state: TrainState, batch: DeviceBatch, lr: float) -> StepResult:
        seen.append(batch)
        return train_step(state, batch, lr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", seeing)
        train_rank(backend, resolved)
    return seen


def test_data_parallel_rank_d_trains_on_the_d_th_block_of_each_batch(
    ranks: RankPool, tmp_path: Path, data: dict[str, str | bool]
) -> None:
    rows = torch.from_numpy(np.load(str(data["path"])).astype(np.int64))
    resolved = run_plan(tmp_path / "run", data, steps=3, parallel={"dp": 2})
    for rank, seen in enumerate(ranks.run(2, batches_of, resolved)):
        for step, batch in enumerate(seen):
            block = rows[step * GLOBAL_BATCH :][:GLOBAL_BATCH].chunk(2)[rank]
            assert torch.equal(torch.cat(list(batch.inputs)), block[:, :-1])
            assert torch.equal(torch.cat(list(batch.targets)), block[:, 1:])
