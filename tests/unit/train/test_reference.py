"""The name of a stored reference has a hash of all that its log-probabilities depend on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nxtrain.config.schema import RunConfig
from nxtrain.data.arrow.pairs import PairSamples
from nxtrain.data.prepare import digest
from nxtrain.train import reference


@pytest.fixture(autouse=True)
def known_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "HfFolder", lambda path: SimpleNamespace(fingerprint=lambda: "weights"))


def name_of(tmp_path: Path, *, pairs_per_row: int = 8, **sections: Any) -> str:
    config = RunConfig.model_validate({"run": {"dir": tmp_path}, **sections})
    given = {"identity": "pairs", "seq_len": 32, "labelled": False, "location": tmp_path / "a"}
    samples = SimpleNamespace(**given, pairs_per_row=pairs_per_row)
    return reference._file(config, cast(PairSamples, samples)).name


def test_files_of_earlier_runs_without_a_capacity_keep_their_names(tmp_path: Path) -> None:
    expected = f"a.reference-{digest('weights', 'full', 'fp32', [], 'pairs', 32)}.npy"
    assert name_of(tmp_path) == expected
    others: dict[str, Any] = {"model": {"moe_z_loss": 0.1}, "train": {"micro_batch": 2}, "optim": {"lr": 1.0}}
    assert name_of(tmp_path, pairs_per_row=4, **others) == expected


def test_what_changes_log_probabilities_changes_the_name(tmp_path: Path) -> None:
    capacity = {"moe_dispatch": "capacity"}
    names = [
        name_of(tmp_path),
        name_of(tmp_path, precision={"params": "bf16"}),
        name_of(tmp_path, precision={"fp8": "rowwise"}),
        name_of(tmp_path, precision={"fp8": "tensorwise"}),
        name_of(tmp_path, model=capacity),
        name_of(tmp_path, model=capacity, precision={"fp8": "rowwise"}),
        name_of(tmp_path, model={**capacity, "moe_capacity_factor": 2.0}),
        name_of(tmp_path, model=capacity, train={"micro_batch": 2}),
        name_of(tmp_path, model=capacity, pairs_per_row=4),
    ]
    assert len(set(names)) == len(names)
