"""An export is compared with what was exported, and a damaged one is not believed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint import layout
from nxtrain.checkpoint.convert import hf_to_nxtrain, nxtrain_to_hf
from nxtrain.checkpoint.model import verify_export
from nxtrain.errors import CheckpointError
from tests.support.models import hf_model, plan


def test_a_faithful_export_passes_and_a_changed_weight_does_not(tmp_path: Path) -> None:
    hf_model(plan("gqa")).save_pretrained(tmp_path / "hf")
    hf_to_nxtrain(tmp_path / "hf", tmp_path / "ours")
    checkpoint = nxtrain_to_hf(tmp_path / "ours", tmp_path / "export")
    assert checkpoint == layout.resolve(tmp_path / "ours")
    assert verify_export(checkpoint, tmp_path / "export", CpuBackend()) < 1e-5

    file = tmp_path / "export" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"] * torch.tensor(1.01)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="differ"):
        verify_export(checkpoint, tmp_path / "export", CpuBackend())
