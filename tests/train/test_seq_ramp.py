"""Runs whose sequences grow: the losses of rows that are so short, any number of ranks, a stop after any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.batch_sizes import BatchSizes, SeqLengths
from nxtrain.config.batch_ramp import seq_lengths
from nxtrain.config.check import Resolved
from nxtrain.data import BatchShare, Loader
from nxtrain.data.samples import TableSamples
from nxtrain.train.step import train_step
from nxtrain.train.trainer import on_device
from tests.support.commands import in_process
from tests.support.corpora import documents, write_corpus, write_tokenizer
from tests.support.models import changed, weights_of
from tests.support.parity import OPTIM, reference, start
from tests.support.ranks import RankPool
from tests.support.runs import SEQ_LEN, assert_equal_bits, course, records, run_plan, state_at, token_file, train_rank

STEPS, BATCH = 7, 4
RAMP = [{"seq_len": SEQ_LEN // 4, "tokens": 5 * SEQ_LEN}, {"seq_len": SEQ_LEN // 2, "tokens": 8 * SEQ_LEN}]
LENGTHS = [SEQ_LEN // 4] * 2 + [SEQ_LEN // 2] * 2 + [SEQ_LEN] * 3
"""The first stage ends with 8 rows, the first multiple of 4 from 5 on, and the second with 16 rows."""


def planned(folder: Path, steps: int = STEPS, dp: int = 1, source: str = "tokens", **sections: Any) -> Resolved:
    shared = folder.parent
    if not (shared / "tokenizer").exists():
        write_tokenizer(shared / "tokenizer")
        token_file(shared / "rows.npy", num_rows=70)
        corpus = write_corpus(shared, "a.jsonl", documents(40))
        made = ("--tokenizer", shared / "tokenizer", "--out", shared / "rows.arrow")
        assert in_process("data", "prepare", corpus, *made)[0] == 0
    data: dict[str, Any] = {"source": source, "shuffle": False, "doc_mask": True}
    data["tokenizer"] = str(shared / "tokenizer")
    data["path"] = str(shared / ("rows.npy" if source == "tokens" else "rows.arrow"))
    train = {"global_batch": BATCH, "micro_batch": 1, "seq_ramp": RAMP, **sections.pop("train", {})}
    tables: dict[str, Any] = {
        "optim": {"schedule": "constant", "lr": 1e-2},
        "checkpoint": {"every": 1, "keep": 20, "async": False},
        "model": {"config": {"vocab_size": 300}},
    }
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    return run_plan(folder, data, steps=steps, train=train, parallel={"dp": dp}, **tables)


def ramped_losses(
    backend: Backend, resolved: Resolved, rows: NDArray[Any], given: dict[str, Tensor], is_sound: bool
) -> list[float]:
    """Losses of this rank's steps over the loader's batches, from given weights."""
    state, train = start(backend, resolved, given), resolved.config.train
    sizes, dp = train.batch_sizes(), resolved.config.parallel.dp
    lengths = seq_lengths(train.seq_ramp, train.seq_len, sizes) if is_sound else None
    share = BatchShare(BATCH, 1, state.mesh.dp.rank, dp, lengths=lengths)
    loader = Loader(TableSamples(rows), share, seed=0, shuffle=False, doc_mask=True)
    batches = [on_device(state, loader.batch(step)) for step in range(STEPS)]
    return [train_step(state, batch, resolved.config.optim.lr).loss.item() for batch in batches]


@pytest.mark.parametrize(
    "parallel", [{"dp": 1}, {"dp": 2}, {"dp": 1, "cp": 2, "cp_layout": "zigzag"}], ids=["dp1", "dp2", "cp2"]
)
def test_losses_are_those_of_rows_so_short(ranks: RankPool, tmp_path: Path, parallel: dict[str, Any]) -> None:
    resolved = changed(planned(tmp_path / "run", optim=OPTIM), parallel=parallel)
    rows = np.load(tmp_path / "rows.npy").astype(np.int64)
    pairs = []
    for step, length in enumerate(LENGTHS):
        batch = torch.from_numpy(rows[step * BATCH : (step + 1) * BATCH])
        pairs.append((batch[:, :-1].reshape(-1, length), batch[:, 1:].reshape(-1, length)))
    wanted = reference(resolved, STEPS, pairs).losses
    world = parallel["dp"] * parallel.get("cp", 1)
    for losses in ranks.run(world, ramped_losses, resolved, rows, weights_of(resolved), True):
        assert losses == pytest.approx(wanted, rel=2e-6)
    for losses in ranks.run(world, ramped_losses, resolved, rows, weights_of(resolved), False):
        assert losses != pytest.approx(wanted, rel=1e-4), "rows that are never cut prove nothing"


@pytest.mark.parametrize("source", [pytest.param("tokens", marks=pytest.mark.slow), "arrow"])
def test_records_name_the_length_and_ranks_see_the_same_samples(ranks: RankPool, tmp_path: Path, source: str) -> None:
    ranks.run(1, train_rank, planned(tmp_path / "alone", source=source))
    ranks.run(2, train_rank, planned(tmp_path / "ranks", dp=2, source=source))
    alone, shared = course(tmp_path / "alone"), course(tmp_path / "ranks")
    assert [record["seq_len"] for record in alone] == LENGTHS == [record["seq_len"] for record in shared]
    for one, other in zip(alone, shared, strict=True):
        assert (one["tokens"], one["targets"]) == (other["tokens"], other["targets"])
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-6)
    plain = planned(tmp_path / "plain", source=source, train={"seq_ramp": ()})
    ranks.run(1, train_rank, plain)
    uncut = course(tmp_path / "plain")
    assert "seq_len" not in uncut[0] and uncut[0]["loss"] != alone[0]["loss"]


def train_by_peak(backend: Backend, resolved: Resolved) -> None:
    """A run on a device of a trillion operations per second."""
    with patch.object(type(backend.diagnostics), "peak_flops", lambda *_: 1e12):
        train_rank(backend, resolved)


def test_utilization_counts_the_operations_of_shorter_sequences(ranks: RankPool, tmp_path: Path) -> None:
    for steps in (3, STEPS):  # the second start goes on inside of a stage
        resolved = planned(tmp_path / "run", steps)
        ranks.run(1, train_by_peak, resolved)
    for record, length in zip(records(tmp_path / "run"), LENGTHS, strict=True):
        flops = resolved.dimensions.flops_per_token(length)
        assert record["mfu"] == pytest.approx(flops * record["tokens_per_s"] / 1e12)


@pytest.mark.parametrize(
    ("dp", "source"), [(1, "arrow"), (2, "tokens"), pytest.param(4, "arrow", marks=pytest.mark.slow)]
)
def test_a_stop_after_any_step_of_the_ramp_is_the_straight_run(
    ranks: RankPool, tmp_path: Path, dp: int, source: str
) -> None:
    whole = planned(tmp_path / "straight", dp=dp, source=source)
    ranks.run(dp, train_rank, whole)
    for steps in range(1, STEPS + 1):
        ranks.run(dp, train_rank, planned(tmp_path / "parts", steps, dp=dp, source=source))
    assert course(tmp_path / "parts") == course(tmp_path / "straight")
    runs = [tmp_path / name for name in ("parts", "straight")]
    assert_equal_bits(*(ranks.run(1, state_at, run, STEPS, whole)[0] for run in runs))


def test_another_ramp_is_refused_and_goes_by_the_tokens_seen(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, train_rank, planned(tmp_path / "run", 3))
    longer = {"seq_ramp": [{"seq_len": SEQ_LEN // 4, "tokens": 20 * SEQ_LEN}], "global_batch": 2}
    with pytest.raises(AssertionError, match=r"train\.seq_ramp is .*allow_drift=\[.batch.\]"):
        ranks.run(1, train_rank, planned(tmp_path / "run", train=longer))
    ranks.run(1, train_rank, planned(tmp_path / "run", 9, train=longer, checkpoint={"allow_drift": ("batch",)}))
    found = records(tmp_path / "run")[3:]
    assert [record["tokens"] // SEQ_LEN for record in found] == [14, 16, 18, 20, 22, 24]
    assert [record["seq_len"] for record in found] == [SEQ_LEN // 4] * 4 + [SEQ_LEN] * 2


def test_a_stage_ends_before_the_first_step_with_its_tokens_seen() -> None:
    lengths = SeqLengths(64, ((100, 16), (256, 32)), BatchSizes(1, ((2, 2),)))
    assert [lengths.at(step) for step in range(5)] == [16, 32, 64, 64, 64]
    with patch.object(BatchSizes, "before", lambda self, step: step):
        assert [lengths.at(step) for step in range(5)] == [16, 16, 32, 32, 64]
