"""Targets with the tokens of a teacher: shares that add up, files that do not fit, and keys that exclude them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxtrain.common.errors import DataError
from nxtrain.common.vocab import IGNORE_INDEX, PROBABILITY_UNITS
from nxtrain.config.schema import DataConfig
from nxtrain.data import BatchShare, Loader
from nxtrain.data.dataset import open_data
from nxtrain.data.teacher import mixed
from tests.support.drawn import drawn_tokens
from tests.unit.config.test_check import checked, only

ROWS, K, S, V = 6, 3, 5, 40


def files(folder: Path, k: int = K) -> tuple[Path, Path, Any]:
    rng = np.random.default_rng(k)
    np.save(folder / "rows.npy", rng.integers(0, V, (ROWS, S + 1)))
    ids, units = drawn_tokens(rng, ROWS, k, S, V)
    np.save(folder / "taught.npy", np.concatenate([ids, units], axis=1).reshape(ROWS, -1).astype(np.int32))
    return folder / "rows.npy", folder / "taught.npy", (ids, units)


def opened(folder: Path, **data: Any) -> Any:
    keys = {"source": "tokens", "path": str(folder / "rows.npy"), "teacher": str(folder / "taught.npy"), "teacher_k": K}
    config = DataConfig.model_validate({**keys, "validation_fraction": 0.0, **data})
    return open_data(config, seq_len=S, vocab_size=V, workdir=folder, leader=True, barrier=lambda: None)


@pytest.mark.parametrize("weight", [1.0, 0.3, 1e-7])
def test_shares_of_a_target_add_up_to_the_last_unit(weight: float) -> None:
    ids, units = drawn_tokens(np.random.default_rng(1), 4, 7, 9, 50)
    units[0] = np.minimum(units[0], 1)  # tiny shares
    targets = np.arange(36).reshape(2, 2, 9)
    result = mixed(targets, ids, units, weight)
    assert result.shape == (2, 2, 16, 9)
    of_ids, shares = np.split(result.reshape(4, 16, 9), 2, axis=1)
    assert (of_ids[:, 0] == targets.reshape(4, 9)).all() and (of_ids[:, 1:] == ids).all()
    assert (shares >= 0).all() and (shares.sum(axis=1) == PROBABILITY_UNITS).all()
    is_taught = units.sum(axis=1) > 0
    assert (shares[:, 0][~is_taught] == PROBABILITY_UNITS).all() and not is_taught.all()
    assert (shares[:, 0][is_taught] == round((1 - weight) * PROBABILITY_UNITS)).all()
    wanted = weight * units / np.maximum(units.sum(axis=1, keepdims=True), 1)
    assert np.abs(shares[:, 1:] / PROBABILITY_UNITS - wanted).max() < 8 / PROBABILITY_UNITS


def test_a_batch_has_the_teachers_tokens_of_its_own_rows(tmp_path: Path) -> None:
    rows, _, (ids, units) = files(tmp_path)
    data = opened(tmp_path, teacher_weight=0.5)
    loader = Loader(data.train, BatchShare(4, 1, 1, 2), seed=3, shuffle=True)
    batch, indices = loader.batch(1), loader.indices(1)
    assert batch.targets.shape == (2, 1, 2 * (1 + K), S) and batch.num_tokens == 2 * S
    table = np.load(rows)
    assert (batch.targets[:, 0, 0] == table[indices, 1:]).all()
    assert (batch.targets[:, 0] == mixed(table[indices, 1:], ids[indices], units[indices], 0.5)).all()
    assert data.fingerprint != opened(tmp_path, teacher_weight=0.4).fingerprint
    assert data.fingerprint != opened(tmp_path, teacher="", teacher_k=0).fingerprint


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    files(tmp_path)
    with pytest.raises(DataError, match=r"2 x 4 x 5 = 40 numbers"):
        opened(tmp_path, teacher_k=4)
    table = np.load(tmp_path / "taught.npy")
    np.save(tmp_path / "short.npy", table[1:])
    with pytest.raises(DataError, match=r"has 5 rows, and data\.path 6"):
        opened(tmp_path, teacher=str(tmp_path / "short.npy"))
    table[2, 1] = V
    np.save(tmp_path / "foreign.npy", table)
    foreign = opened(tmp_path, teacher=str(tmp_path / "foreign.npy")).train
    with pytest.raises(DataError, match=f"the id {V}, outside of the vocabulary, 0 to {V - 1}"):
        foreign.with_teacher(np.full((1, 1, S), IGNORE_INDEX), np.array([2]))


def test_keys_that_a_teacher_excludes(tmp_path: Path) -> None:
    taught = ("data.teacher=taught.npy", "data.teacher_k=3")
    tokens = ("data.source=tokens", "data.path=rows.npy", "data.validation_fraction=0", "train.eval_every=0")
    checked(tmp_path, *tokens, *taught)
    assert only(tmp_path, *tokens, "data.teacher_k=3").key == "data.teacher_k"
    assert only(tmp_path, *tokens, "data.teacher_weight=0.5").key == "data.teacher_weight"
    assert only(tmp_path, *tokens, "data.teacher=taught.npy").key == "data.teacher_k"
    assert "data.source=stdlib" in only(tmp_path, *taught).reason
    assert "nxd" in only(tmp_path, *tokens, *taught, "backend.layers=nxd", "backend.name=neuron").reason
