"""Adapters of a run: the fingerprint of their frozen base, and their export."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from nxtrain.checkpoint.convert.hf_folder import HfFolder
from nxtrain.checkpoint.convert.peft import adapter_of, write_adapter
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.shards import MODEL, owned, tensor_shards
from nxtrain.config.schema import RunConfig
from nxtrain.train.start import shards_of
from nxtrain.train.step import TrainState


def base_fingerprint(config: RunConfig) -> str:
    """Identity of the frozen weights; empty for a run that trains every weight."""
    return HfFolder(Path(config.model.hf)).fingerprint() if config.finetune.adapts else ""


def save_adapter(folder: Path, state: TrainState, meta: Meta) -> None:
    """Write the adapter that all ranks hold together in PEFT's format. Every rank calls this.

    Args:
        folder: Folder to make; an earlier adapter is replaced.
        state: Train state.
        meta: Metadata of the run.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    weights = shards_of(state)[MODEL]
    state.backend.step_boundary()
    held = owned(list(tensor_shards({MODEL: weights}, state.layout)))
    mine = [(shard, shard.of(weights[shard.parameter]).cpu()) for shard in held]
    tensors: dict[str, Tensor] = {}
    for part in state.ranks.gather(mine):
        for shard, values in part:
            whole = tensors.setdefault(shard.name, torch.zeros(shard.shape, dtype=shard.dtype))
            box = zip(shard.block.offsets, shard.block.sizes, strict=True)
            whole[tuple(slice(start, start + size) for start, size in box)].copy_(values)
    state.ranks.on_leader(lambda: write_adapter(folder, adapter_of(meta, tensors)), f"cannot write {folder}")
