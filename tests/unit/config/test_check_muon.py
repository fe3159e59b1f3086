"""Rules of the choice of an optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.test_check import checked, only, problems

MUON = "optim.name=muon"


@pytest.mark.parametrize(
    "key",
    [
        "adam_lr=1e-3",
        "muon_scale=original",
        "muon_momentum=0.9",
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
