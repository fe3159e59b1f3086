"""A file that is written in batches of rows is the file that `safetensors` writes of whole tensors, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nxtrain.checkpoint.convert import streamed
from nxtrain.checkpoint.shards import TensorShard

TENSORS = {
    "model.layers.10.weight": torch.randn(37, 29).bfloat16(),
    "model.layers.9.weight": torch.randn(64, 3),
    "model.norm.weight": torch.randn(7).bfloat16(),
    "empty.weight": torch.randn(0, 4),
    "hollow.weight": torch.randn(4, 0),
    "wide.weight": torch.randn(2, 500),
    "\u00fcmlaut": torch.arange(5),
}


@pytest.mark.parametrize("batch_bytes", [1, 100, 1000, 4000, 1 << 20])
def test_the_bytes_are_those_of_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    monkeypatch.setattr(streamed, "BATCH_BYTES", batch_bytes)
    largest_row = 2000

    def read(batch: Mapping[TensorShard, Tensor]) -> None:
        assert sum(chunk.num_bytes for chunk in batch) <= max(batch_bytes, largest_row)
        for chunk, rows in batch.items():
            rows.copy_(chunk.of(TENSORS[chunk.name]))

    chunks = [TensorShard.whole(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]
    streamed.write_streamed(tmp_path / "ours", chunks, read)
    save_file(TENSORS, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
