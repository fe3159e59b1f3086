"""An export is compared with what was exported, and a damaged one is not believed, in any type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.convert import verify_export as verification
from nxtrain.checkpoint.convert.hf import hf_to_nxtrain, nxtrain_to_hf
from nxtrain.checkpoint.convert.verify_export import verify_export
from nxtrain.common.errors import CheckpointError
from tests.support.models import SHAPES, hf_model, plan

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]
NORM = "model.layers.0.input_layernorm.weight"


def exported(folder: Path, shape: str, dtype: torch.dtype, std: float) -> tuple[Path, Path]:
    """A checkpoint of a random model, and its export."""
    hf_model(plan(shape), std=std).to(dtype).save_pretrained(folder / "hf")
    hf_to_nxtrain(folder / "hf", folder / "ours")
    checkpoint = nxtrain_to_hf(folder / "ours", folder / "export")
    assert checkpoint == directory.find_checkpoint(folder / "ours")
    return directory.find_checkpoint(folder / "ours"), folder / "export"


WIDTHS = {"hidden_size": 66, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
EXPERTS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 37},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 13},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 13},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 13},
}


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exports_of_experts_of_any_width_are_verified(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = plan("gqa2", model={"family": family, "config": {**WIDTHS, **EXPERTS[family]}})
    hf_model(model, std=0.1).to(dtype).save_pretrained(tmp_path / "hf")
    hf_to_nxtrain(tmp_path / "hf", tmp_path / "ours")
    nxtrain_to_hf(tmp_path / "ours", tmp_path / "export")
    verify_export(directory.find_checkpoint(tmp_path / "ours"), tmp_path / "export", CpuBackend())


def change(export: Path, act: Change) -> None:
    """Rewrite an export."""
    file, settings = export / "model.safetensors", export / "config.json"
    weights, config = load_file(file), json.loads(settings.read_text(encoding="utf-8"))
    act(weights, config)
    save_file(weights, file, metadata={"format": "pt"})
    settings.write_text(json.dumps(config), encoding="utf-8")


def swap_gate_and_up(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]


def scale_norm(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    weights[NORM] = weights[NORM] * 1.05


def other_theta(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    for table in (config, config["rope_parameters"]):  # as releases of transformers before and after 5 read it
        assert table["rope_theta"] != 500_000.0
        table["rope_theta"] = 500_000.0


def swap_heads(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Two query heads of other K/V heads change places."""
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name] = weights[name].view(8, 8, 64).flip(0).reshape(64, 64).contiguous()


CHANGES = (swap_gate_and_up, scale_norm, other_theta, swap_heads)


@pytest.mark.parametrize("act", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_changed_export_is_refused_however_small_its_scores_are(
    tmp_path: Path, dtype: torch.dtype, act: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the changes moves a score by 0.25, which a fixed bound for bfloat16 must allow."""
    checkpoint, export = exported(tmp_path, "gqa", dtype, std=0.04)
    change(export, act)
    with pytest.raises(CheckpointError, match=r"differ from ours by .*; do not use"):
        verify_export(checkpoint, export, CpuBackend())
    for name in ("EXACT", "ROUNDING", "WORST_ROUNDING"):
        monkeypatch.setattr(verification, name, 1e9)
    assert 1e-4 < verify_export(checkpoint, export, CpuBackend()).difference < 0.25


@pytest.mark.parametrize("shape", SHAPES)
def test_a_faithful_export_is_as_exact_as_transformers(tmp_path: Path, shape: str) -> None:
    """Scores of tens included, which bfloat16 moves by more than 0.25."""
    for std in (0.05, 0.3):
        result = verify_export(*exported(tmp_path / f"{std}", shape, torch.bfloat16, std), CpuBackend())
        assert 0.3 < result.rounding <= 1.2
        assert (result.difference > 0.25) is (std > 0.1)


@pytest.mark.parametrize("shape", ["gqa", "tied"])
def test_a_faithful_export_in_float32_is_exact(tmp_path: Path, shape: str) -> None:
    result = verify_export(*exported(tmp_path, shape, torch.float32, std=0.05), CpuBackend())
    assert result.difference < 1e-5


def test_a_family_that_is_newer_than_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, export = exported(tmp_path, "gqa", torch.float32, std=0.05)
    monkeypatch.setattr("transformers.CONFIG_MAPPING", {})
    with pytest.raises(CheckpointError, match=r"transformers [\d.]+ has no llama; compare .*"):
        verify_export(checkpoint, export, CpuBackend())


def test_the_type_of_weights_has_the_name_that_transformers_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeuronX Distributed needs transformers 4.51."""
    assert verification.of_type(torch.float16) == {"dtype": torch.float16}
    monkeypatch.setattr("transformers.PretrainedConfig", object)
    assert verification.of_type(torch.float16) == {"torch_dtype": torch.float16}
