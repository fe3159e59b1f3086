"""Weights that are not finite are never saved, and no policy goes on with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nxtrain.common.errors import DivergedError
from nxtrain.train import trainer
from tests.support.commands import trained, write_config
from tests.support.runs import course, saved_steps

STEP = 9
"""After which a weight is NaN; the next look is after step 12, whose checkpoint is due."""


def poison_once() -> None:
    poison(STEP)


def poison(at: int) -> None:
    module: Any = trainer
    train_step, steps = module.train_step, [0]

    def spoilt(state: Any, *args: Any) -> Any:
        result = train_step(state, *args)
        steps[0] += 1
        if steps[0] == at:
            with torch.no_grad():
                list(state.model.parameters())[-1].view(-1)[0] = float("nan")
        return result

    module.train_step = spoilt


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_run_whose_weights_are_nan_ends_and_keeps_its_checkpoints(tmp_path: Path, policy: str) -> None:
    write_config(tmp_path, steps=40)
    options = (f"recovery.non_finite={policy}", "metrics.log_every=4", "checkpoint.async=false")
    output = trained(tmp_path, *options, first=poison_once, code=DivergedError.exit_code)
    assert "error: step 12: param_norm=nan" in output
    assert "steps 10, 11, 12" in output
    assert saved_steps(tmp_path / "run") == [4, 8]


def test_a_rollback_mends_the_weights(tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    """The reference is the run without a fault."""
    write_config(tmp_path, steps=12)
    options = ("recovery.non_finite=rollback", "checkpoint.async=false")
    trained(tmp_path, *options, "metrics.log_every=4", first=poison_once, code=1)
    output = trained(tmp_path, *options)
    assert "continues after step 8\n" in output
    assert course(tmp_path / "run")[-4:] == straight[-4:]
    noted = (tmp_path / "run/logs/non_finite.jsonl").read_text(encoding="utf-8").splitlines()
    verdicts = [(line["step"], line["verdict"]) for line in map(json.loads, noted)]
    assert verdicts == [(step, verdict) for verdict in ("rolled_back", "transient") for step in (10, 11, 12)]
