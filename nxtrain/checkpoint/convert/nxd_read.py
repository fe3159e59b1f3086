"""Conversion of NeuronX Distributed's rank files to a checkpoint, with one unsharded tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxtrain.checkpoint.convert.hf import CHECKPOINT_FILES, dtype_name, refuse_to_overwrite
from nxtrain.checkpoint.convert.nxd_files import MASTER, MEANS, OPTIM_DIR, USER_CONTENT, find_tag, open_file
from nxtrain.checkpoint.convert.nxd_states import NxdStates
from nxtrain.checkpoint.convert.nxd_weights import NxdWeights
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.checkpoint.save import read_back, write
from nxtrain.checkpoint.shards import MODEL, TensorShard
from nxtrain.checkpoint.staging import LazyTensors, Staged
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import CheckpointError, ConfigError, cause_of
from nxtrain.common.family import ModelConfig, ModelFamily, find_family
from nxtrain.common.hf_files import CONFIG
from nxtrain.common.io.regular import read_text
from nxtrain.common.mesh import Mesh
from nxtrain.config.schema import RunConfig

FAMILY = "llama"
OURS = "nxtrain"
"""Key in NxD's user content under which nxtrain keeps metadata that NxD's format lacks."""
KEPT = frozenset(
    {
        "samples",
        "tokens",
        "seed",
        "global_batch",
        "batch_ramp",
        "seq_ramp",
        "data_cursor",
        "loss_scale",
        "rewarm_after",
        "stability",
        "settings",
        "shuffle",
        "data_fingerprint",
        "tokenizer_fingerprint",
        "end_of_text",
        "config_fingerprint",
        "code_fingerprint",
    }
)
"""Fields of `Meta` under `OURS`: all that a run needs to resume, besides tensors and model."""


def nxd_to_nxtrain(
    src: Path,
    dst: Path,
    *,
    config: Path | None = None,
    weights_only: bool = False,
    first_copy: bool = False,
    run: RunConfig | None = None,
) -> Meta:
    """Convert a Llama checkpoint of NeuronX Distributed to a checkpoint of nxtrain.

    Args:
        src: Checkpoint of NxD (tag), or a folder of tags, whose newest finished tag is converted.
        dst: Folder to create.
        config: Hugging Face `config.json` of the model; None for the file in the tag, or next to the tag.
        weights_only: Convert no optimizer state.
        first_copy: Use the first replica if replicas on tensor parallel ranks differ.
        run: Configuration of the run that will resume. Its seed, batch and sequence length give the position in the
            data, which NxD does not save. A tag that nxtrain wrote contains the position.
    """
    tag = find_tag(src)
    family, model = _model(tag, config)
    source = NxdWeights.open(tag, family, model, take_first=first_copy)
    refuse_to_overwrite(dst, CHECKPOINT_FILES)
    states = None
    if not weights_only and (tag / OPTIM_DIR).is_dir():
        states = NxdStates.open(source, tag / OPTIM_DIR)
    saved = _saved_metadata(tag / USER_CONTENT)
    if run is not None and states is not None and not saved:
        saved = _metadata_of(run, states.step)
    types = {MODEL: source.dtype}
    step = 0
    if states is None:  # weights alone, which are at step 0 of any run
        saved = {key: saved[key] for key in ("seed", "end_of_text", "tokenizer_fingerprint") if key in saved}
    mesh = {"pp": source.grid.pp, "dp": 1, "tp": source.grid.tp}
    if states is not None:
        types |= dict.fromkeys(MEANS, states.dtype)
        has_master = MASTER in saved["kinds"] if "kinds" in saved else states.has_master
        if has_master:
            types[MASTER] = torch.float32
        step = states.step
        mesh["dp"] = states.grid.dp
    chunks: list[TensorShard] = []
    for kind, dtype in types.items():
        chunks += source.chunks(kind, dtype)
    values = {
        "samples": 0,
        "tokens": 0,
        "seed": 0,
        **{key: value for key, value in saved.items() if key in KEPT},
        "step": step,
        "family": family.name,
        "config": model.model_dump(mode="json"),
        "dtype": dtype_name(source.dtype),
        "state_dtype": dtype_name(types.get(MEANS[0], torch.float32)),
        "mesh": mesh,
        "kinds": tuple(types),
    }
    meta = Meta.model_validate_json(json.dumps(values))

    def read(chunk: TensorShard) -> Tensor:
        if chunk.kind == MODEL:
            return source.assemble(chunk, source.local)
        assert states is not None
        return source.assemble(chunk, states.local)

    alone = StorageScope(Ranks(Mesh(1, 0)))
    order = sorted(chunks, key=lambda chunk: source.owners[chunk.name])  # by stage, so that few files are open
    read_back(dst, write(dst, Staged(LazyTensors(order, read)), meta, alone), alone)
    return read_meta(dst)


def _saved_metadata(file: Path) -> Mapping[str, Any]:
    """Read the metadata that nxtrain wrote to a tag's user content; empty if NxD wrote the tag."""
    try:
        saved: Mapping[str, Any] = open_file(file).get(OURS, {})
    except CheckpointError:  # missing, or other content that a user's script wrote
        return {}
    return saved


def _metadata_of(run: RunConfig, step: int) -> Mapping[str, Any]:
    """Return the position in the data and the seed of a run after a step, from the run's configuration."""
    samples = run.train.batch_sizes().before(step)
    return {
        "samples": samples,
        "tokens": samples * run.train.seq_len,
        "seed": run.run.seed,
        "global_batch": run.train.global_batch,
    }


def _model(tag: Path, file: Path | None) -> tuple[ModelFamily, ModelConfig]:
    candidates = [tag / CONFIG, tag.parent / CONFIG]
    if file is not None:
        candidates = [file]
    config = next((path for path in candidates if path.is_file()), None)
    if config is None:
        raise ConfigError(
            f"there is no {CONFIG} in {tag} or its parent folder, since NeuronX Distributed saves tensors only; give "
            "the file of the training script by --config FILE"
        )
    try:
        values = json.loads(read_text(config))
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"{config} is not a Hugging Face {CONFIG}: {cause_of(error)}") from error
    family = find_family(str(values.get("model_type", FAMILY)))
    if family.name != FAMILY:
        raise ConfigError(
            f"{config} describes a {family.name}, but NeuronX Distributed's files are read for Llama only"
        )
    return family, family.from_hf(values)
