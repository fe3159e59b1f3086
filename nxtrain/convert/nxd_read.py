"""From NeuronX Distributed's rank files to a checkpoint, one whole tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxtrain.checkpoint.dcp_planner import ChunkSavePlanner
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.checkpoint.save import read_back, write
from nxtrain.checkpoint.shards import MODEL, Chunk
from nxtrain.config.schema import RunConfig
from nxtrain.convert.hf import CHECKPOINT_FILES, dtype_name, refuse_to_overwrite
from nxtrain.convert.hf_folder import CONFIG
from nxtrain.convert.nxd_files import MASTER, MEANS, OPTIM_DIR, USER_CONTENT, find_tag, open_file
from nxtrain.convert.nxd_states import NxdStates
from nxtrain.convert.nxd_weights import NxdWeights
from nxtrain.errors import CheckpointError, ConfigError
from nxtrain.family import ModelConfig, ModelFamily, find_family
from nxtrain.io.regular import read_text
from nxtrain.mesh import Mesh

FAMILY = "llama"
OURS = "nxtrain"
"""Key of the user content under which we keep what NxD has no place for."""


def nxd_to_nxtrain(
    src: Path,
    dst: Path,
    *,
    config: Path | None = None,
    weights_only: bool = False,
    first_copy: bool = False,
    run: RunConfig | None = None,
) -> Meta:
    """Turn a checkpoint of NeuronX Distributed's Llama into one of ours.

    Args:
        src: A tag, or a folder of tags, whose last finished one is taken.
        dst: Folder to make; a checkpoint that is there already is replaced.
        config: The model's Hugging Face `config.json`; None: the one in the tag, or beside it.
        weights_only: Leave out the state of the optimizer.
        first_copy: Where tensor parallel ranks differ in what they should share, take what the first has.
        run: What will go on from it; its seed, its batch and its sequences say where its data stands, which NxD does
            not keep. A tag that we had written says so itself.

    Returns:
        What the checkpoint says about itself.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged, or keeps what ours cannot.
        ConfigError: There is no configuration, or the tensors are not those of the model.
    """
    tag = find_tag(src)
    family, model = _model(tag, config)
    source = NxdWeights.open(tag, family, model, take_first=first_copy)
    refuse_to_overwrite(dst, CHECKPOINT_FILES)
    states = None if weights_only or not (tag / OPTIM_DIR).is_dir() else NxdStates.open(source, tag / OPTIM_DIR)
    kept = _kept(tag / USER_CONTENT)
    if run is not None and states is not None and not kept:
        samples = states.step * run.train.global_batch
        kept = {
            "samples": samples,
            "tokens": samples * run.train.seq_len,
            "seed": run.run.seed,
            "global_batch": run.train.global_batch,
        }
    chunks = source.chunks(MODEL, source.dtype)
    kinds: tuple[str, ...] = (MODEL,)
    if states is not None:
        has_master = MASTER in kept["kinds"] if "kinds" in kept else states.has_master
        kinds = (MODEL, *MEANS, *((MASTER,) if has_master else ()))
        chunks += [c for kind in MEANS for c in source.chunks(kind, states.dtype)]
        chunks += source.chunks(MASTER, torch.float32) if has_master else []
    meta = Meta(
        step=states.step if states else 0,
        samples=kept.get("samples", 0) if states else 0,
        tokens=kept.get("tokens", 0) if states else 0,
        global_batch=kept.get("global_batch", 0),
        seed=kept.get("seed", 0),
        family=family.name,
        config=model.model_dump(mode="json"),
        dtype=dtype_name(source.dtype),
        state_dtype=dtype_name(states.dtype) if states else "float32",
        data_fingerprint=kept.get("data_fingerprint", ""),
        tokenizer_fingerprint=kept.get("tokenizer_fingerprint", ""),
        config_fingerprint=kept.get("config_fingerprint", ""),
        mesh={"pp": source.grid.pp, "dp": states.grid.dp if states else 1, "tp": source.grid.tp},
        kinds=kinds,
    )

    def read(chunk: Chunk) -> Tensor:
        if chunk.kind == MODEL:
            return source.assemble(chunk, source.local)
        assert states is not None
        return source.assemble(chunk, states.local)

    alone = Mesh(1, 0)
    order = sorted(chunks, key=lambda chunk: source.place(chunk.name))  # stage by stage, so that few files are open
    read_back(dst, write(dst, ChunkSavePlanner(order, read), meta, alone), alone, None)
    return read_meta(dst)


def _kept(file: Path) -> Mapping[str, Any]:
    """What we had written beside the tensors; nothing where a script of NxD's has written since."""
    try:
        kept: Mapping[str, Any] = open_file(file).get(OURS, {})
    except CheckpointError:  # absent, or whatever a script of somebody's put there
        return {}
    return kept


def _model(tag: Path, file: Path | None) -> tuple[ModelFamily, ModelConfig]:
    places = [file] if file else [tag / CONFIG, tag.parent / CONFIG]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ConfigError(
            f"no {CONFIG} in {tag} or beside it: NeuronX Distributed saves tensors only; name the one that its script "
            "was given: --config FILE"
        )
    try:
        values = json.loads(read_text(found))
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"{found} is no Hugging Face {CONFIG}: {error}") from error
    family = find_family(str(values.get("model_type", FAMILY)))
    if family.name != FAMILY:
        raise ConfigError(f"{found} describes a {family.name}; rank files of NeuronX Distributed's Llama are read")
    return family, family.from_hf(values)
