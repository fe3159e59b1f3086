"""Global batches and held-out rows in which no token is a target: nothing is updated, and the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxtrain.data.loader import Batch, Loader
from nxtrain.data.tokenization import load_tokenizer
from tests.support.commands import in_process
from tests.support.corpora import write_tokenizer
from tests.support.runs import SEQ_LEN, course, write_toml

VOCAB = 300
STEPS = 6


def run(folder: Path, empty_steps: Sequence[int], **sections: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Records and messages of a run; the rows of some steps are ends of documents only."""
    tokenizer = write_tokenizer(folder / "tokenizer", VOCAB)
    rows = np.random.default_rng(2).integers(1, VOCAB - 1, (2 * STEPS, SEQ_LEN + 1), dtype=np.uint16)
    rows[rows == load_tokenizer(tokenizer, VOCAB).end_id] = 5
    for step in empty_steps:
        rows[2 * step - 2 : 2 * step] = load_tokenizer(tokenizer, VOCAB).end_id
    np.save(folder / "ids.npy", rows)
    data = {"path": folder / "ids.npy", "tokenizer": tokenizer, "doc_mask": True, "shuffle": False}
    tables: dict[str, Any] = {
        "data": data,
        "model": {"config": {"vocab_size": VOCAB}},
        "train": {"steps": STEPS},
        "optim": {"lr": 1e-2, "min_lr": 1e-3},
    }
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    code, _, said = in_process("train", write_toml(folder, **tables))
    assert code == 0, said
    return course(folder / "run"), said


KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "fp32": {},
    "fp16": {"precision": {"params": "fp16", "update": "fp32_master", "loss_scale": 4.0}},
    "z_loss": {"train": {"z_loss": 1e-3}},
    "experts": {"model": {"family": "mixtral", "moe_z_loss": 1e-2}},
}


@pytest.mark.parametrize("log_every", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_targets_updates_nothing(tmp_path: Path, kind: str, log_every: int) -> None:
    records, said = run(tmp_path, (1, 3), **KINDS[kind], metrics={"log_every": log_every})
    assert [step for record in records for step in record.get("skipped_steps", ())] == [1, 3]
    assert "no token of the global batch is a target, and nothing was updated" in said
    assert not any("alarm" in record for record in records)
    assert "diverged" not in said
    by_step = {record["step"]: record for record in records}
    assert by_step[1]["loss"] is None and by_step[1]["targets"] == 0
    if log_every == 1:
        assert by_step[2]["param_norm"] == by_step[3]["param_norm"] != by_step[4]["param_norm"]
        assert all(by_step[step]["loss"] > 0 for step in (2, 4, 5, 6))
    if kind == "fp16":
        assert {record["loss_scale"] for record in records} == {4.0}


def test_held_out_rows_without_targets_have_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_at = Loader.batch

    def without_targets(loader: Loader, step: int) -> Batch:
        batch = batch_at(loader, step)
        if loader._past_end == "wrap":
            return batch
        return batch.without(np.ones((*batch.inputs.shape[:2], 1), np.bool_))

    monkeypatch.setattr(Loader, "batch", without_targets)
    monkeypatch.setattr("nxtrain.train.results.target_counts", lambda *_, **given: np.zeros(0, np.int64))
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} is a number. " * 30, encoding="utf-8")
    data = {"source": "text", "path": tmp_path / "text", "validation_fraction": 0.5}
    train = {"steps": STEPS, "eval_every": 3}
    code, _, said = in_process("train", write_toml(tmp_path / "held", train=train, data=data))
    assert code == 0, said
    records = course(tmp_path / "held" / "run")
    assert [record["step"] for record in records if "val_loss" in record] == [3, 6]
    assert all(record.get("val_loss") is None for record in records)
    text = (tmp_path / "held" / "run" / "summary.json").read_text(encoding="utf-8")
    unknown = dict.fromkeys(("val_loss", "unigram_entropy", "bits_per_byte", "val_bytes"))
    assert json.loads(text) == {**unknown, "val_tokens": 0}
    assert "NaN" not in text
