"""Rules of train.seq_ramp."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((), "need document masks to be kept apart"),
        (("data.doc_mask=true", "train.seq_len=96"), "stage 1: a row of train.seq_len=96 does not hold several of 64"),
        (("data.doc_mask=true", "train.seq_len=64"), "does not hold several of 64 tokens"),
    ],
)
def test_stages_of_a_sequence_ramp_that_cannot_be(tmp_path: Path, given: tuple[str, ...], reason: str) -> None:
    ramp = "train.seq_ramp=[{seq_len = 64, tokens = 9}]"
    rows = ("data.source=text", "data.path=docs")
    (tmp_path / "run.toml").write_text("", encoding="utf-8")
    sound = (*rows, ramp, "data.doc_mask=true", "train.seq_len=128")
    resolve_config(load(tmp_path / "run.toml", sound), 1)
    with pytest.raises(ConfigError) as refused:
        resolve_config(load(tmp_path / "run.toml", [*rows, ramp, *given]), 1)
    (found,) = refused.value.problems
    assert found.key == "train.seq_ramp" and reason in found.reason
