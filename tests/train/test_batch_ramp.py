"""Runs whose global batch grows: the reference's losses, any number of ranks, a stop after any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.config.check import Resolved
from nxtrain.data import BatchShare, Loader
from nxtrain.data.samples import TableSamples
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import train_step
from tests.support.models import weights_of
from tests.support.parity import OPTIM, reference, start
from tests.support.ranks import RankPool
from tests.support.runs import SEQ_LEN, assert_equal_bits, course, records, run_plan, state_at, token_file, train_rank

STEPS = 8
RAMP = [{"global_batch": 4, "samples": 10}, {"global_batch": 8, "tokens": 14 * SEQ_LEN}]
BATCHES = [4, 4, 4, 8, 8, 12, 12, 12]
"""The first stage ends with 12 sequences, the first number of 4 s that is 10 or more; the second with 28."""


def planned(folder: Path, steps: int = STEPS, dp: int = 1, **sections: Any) -> Resolved:
    rows = folder.parent / "rows.npy"
    if not rows.exists():
        token_file(rows, num_rows=70)
    train = {"global_batch": 12, "micro_batch": 1, "batch_ramp": RAMP, **sections.pop("train", {})}
    tables: dict[str, Any] = {
        "optim": {"schedule": "constant", "lr": 1e-2},
        "checkpoint": {"every": 1, "keep": 20, "async": False},
    }
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    data = {"source": "tokens", "path": str(rows), "shuffle": False}
    return run_plan(folder, data, steps=steps, train=train, parallel={"dp": dp}, **tables)


def ramped_losses(backend: Backend, resolved: Resolved, rows: NDArray[Any], given: dict[str, Tensor]) -> list[float]:
    """Losses of this rank's steps over the loader's batches, from given weights."""
    state, sizes, dp = start(backend, resolved, given), resolved.config.train.batch_sizes(), resolved.config.parallel.dp
    share = BatchShare(12, 1, state.mesh.dp.rank, dp, ramp=sizes)
    loader, losses = Loader(TableSamples(rows), share, seed=0, shuffle=False), []
    for step in range(STEPS):
        batch = loader.batch(step)
        put = DeviceBatch.of(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), backend.put)
        losses.append(train_step(state, put, resolved.config.optim.lr).loss.item())
    return losses


@pytest.mark.parametrize("dp", [1, 2])
def test_losses_are_those_of_the_reference(ranks: RankPool, tmp_path: Path, dp: int) -> None:
    resolved = planned(tmp_path / "run", dp=dp, optim=OPTIM)
    rows = np.load(tmp_path / "rows.npy").astype(np.int64)
    ends, pairs = np.cumsum(BATCHES), []
    for end, size in zip(ends, BATCHES, strict=True):
        batch = torch.from_numpy(rows[end - size : end])
        pairs.append((batch[:, :-1], batch[:, 1:]))
    wanted = reference(resolved, STEPS, pairs).losses
    for losses in ranks.run(dp, ramped_losses, resolved, rows, weights_of(resolved)):
        assert losses == pytest.approx(wanted, rel=2e-6)


def test_every_count_is_that_of_the_sequences_seen(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, train_rank, planned(tmp_path / "run"))
    result, ends = records(tmp_path / "run"), np.cumsum(BATCHES)
    assert [record["tokens"] for record in result] == [int(end) * SEQ_LEN for end in ends]
    assert [record["targets"] for record in result] == [size * SEQ_LEN for size in BATCHES]
    for step, end in enumerate(ends, 1):
        meta = read_meta(directory.step_path(tmp_path / "run" / CHECKPOINTS_DIR, step))
        assert (meta.samples, meta.tokens) == (end, end * SEQ_LEN)


@pytest.mark.parametrize("dp", [2, 4])
def test_more_ranks_see_the_same_samples(ranks: RankPool, tmp_path: Path, dp: int) -> None:
    ranks.run(1, train_rank, planned(tmp_path / "alone"))
    ranks.run(dp, train_rank, planned(tmp_path / "ranks", dp=dp))
    alone, shared = course(tmp_path / "alone"), course(tmp_path / "ranks")
    for one, other in zip(alone, shared, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-5)


@pytest.mark.parametrize("dp", [2, *(pytest.param(dp, marks=pytest.mark.slow) for dp in (1, 4))])
def test_a_stop_after_any_step_of_the_ramp_is_the_straight_run(ranks: RankPool, tmp_path: Path, dp: int) -> None:
    whole = planned(tmp_path / "straight", dp=dp)
    ranks.run(dp, train_rank, whole)
    for steps in range(1, STEPS + 1):
        ranks.run(dp, train_rank, planned(tmp_path / "parts", steps, dp=dp))
    assert course(tmp_path / "parts") == course(tmp_path / "straight")
    runs = [tmp_path / name for name in ("parts", "straight")]
    assert_equal_bits(*(ranks.run(1, state_at, run, STEPS, whole)[0] for run in runs))


def test_another_ramp_is_another_batch(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, train_rank, planned(tmp_path / "run", 4))
    longer = {"batch_ramp": [{"global_batch": 4, "samples": 30}]}
    with pytest.raises(AssertionError, match=r"train\.batch_ramp is .*allow_drift=\[.batch.\]"):
        ranks.run(1, train_rank, planned(tmp_path / "run", train=longer))
    allowed = {"allow_drift": ("batch",)}
    ranks.run(1, train_rank, planned(tmp_path / "run", train=longer, checkpoint=allowed))
    seen = [record["tokens"] // SEQ_LEN for record in records(tmp_path / "run")]
    assert seen == [4, 8, 12, 20, 24, 28, 32, 44]
