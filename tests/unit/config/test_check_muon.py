"""Rules of the choice of an optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.common.errors import ConfigError
from tests.unit.config.test_check import checked, only, problems

MUON = "optim.name=muon"


@pytest.mark.parametrize(
    "key",
    [
        "adam_lr=1e-3",
        "muon_scale=original",
        "muon_momentum=0.9",
        "muon_momentum_pieces=[{steps=300,to=0.95}]",
        "muon_nesterov=false",
        "muon_steps=6",
        "muon_precision=bf16",
    ],
)
def test_keys_of_muon_need_muon(tmp_path: Path, key: str) -> None:
    result = only(tmp_path, f"optim.{key}")
    assert result.key == f"optim.{key.partition('=')[0]}" and "use optim.name=muon" in result.hint
    checked(tmp_path, MUON, f"optim.{key}")


def test_a_rate_that_follows_a_rate_of_zero_is_refused(tmp_path: Path) -> None:
    result = only(tmp_path, MUON, "optim.lr=0", "optim.min_lr=0", "optim.adam_lr=1e-3")
    assert result.key == "optim.adam_lr" and "never reached" in result.reason
    checked(tmp_path, MUON, "optim.lr=0", "optim.min_lr=0")


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_are_left_to_adamw(tmp_path: Path, method: str) -> None:
    given = (f"finetune.method={method}", "model.init=hf", f"model.hf={tmp_path}")
    result = problems(tmp_path, MUON, *given, "backend.name=cpu")
    assert "use optim.name=adamw" in next(problem.hint for problem in result if problem.key == "optim.name")


def test_a_momentum_that_bf16_would_freeze_is_refused(tmp_path: Path) -> None:
    types = ("precision.params=bf16", "precision.update=bf16_kahan", "precision.state=bf16", MUON)
    result = only(tmp_path, *types, "optim.muon_momentum=0.995")
    assert result.key == "precision.state" and "optim.muon_momentum=0.99 or less" in result.hint
    checked(tmp_path, *types, "optim.muon_momentum=0.99")
    random = ("precision.params=bf16", "precision.update=bf16_stochastic", "precision.state=bf16", MUON)
    checked(tmp_path, *random, "optim.muon_momentum=0.995")
    result = only(tmp_path, *types, "optim.muon_momentum_pieces=[{steps=300,to=0.995}]")
    assert result.key == "precision.state" and "optim.muon_momentum_pieces[0].to=0.99 or less" in result.hint
    checked(tmp_path, *random, "optim.muon_momentum_pieces=[{steps=300,to=0.995}]")


@pytest.mark.parametrize("schedule", ["corrected", "decoupled"])
def test_a_weight_decay_over_the_highest_rate_needs_a_rate(tmp_path: Path, schedule: str) -> None:
    result = only(tmp_path, f"optim.weight_decay_schedule={schedule}", "optim.lr=0", "optim.min_lr=0")
    assert result.key == "optim.weight_decay_schedule" and "the highest learning rate, which is 0" in result.reason
    checked(tmp_path, f"optim.weight_decay_schedule={schedule}")
    checked(tmp_path, "optim.weight_decay_pieces=[{steps=9,to=0.0}]", "optim.lr=0", "optim.min_lr=0")


@pytest.mark.parametrize("name", ["beta1_pieces", "beta2_pieces"])
@pytest.mark.parametrize("piece", ["{steps=9,to=1.0}", "{steps=0,to=0.5}", "{steps=2000000,to=0.5}"])
def test_pieces_of_a_beta_have_bounds(tmp_path: Path, name: str, piece: str) -> None:
    with pytest.raises(ConfigError, match=f"optim.{name}"):
        checked(tmp_path, f"optim.{name}=[{piece}]")
