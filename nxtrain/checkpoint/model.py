"""The model of a checkpoint on one device, to read its scores."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from nxtrain.backends.base import Backend
from nxtrain.checkpoint.chunks import MODEL
from nxtrain.checkpoint.hf import HfFolder, HfWeights
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.places import Place
from nxtrain.errors import CheckpointError
from nxtrain.family import BuildContext, CausalLM, find_family
from nxtrain.mesh import Mesh
from nxtrain.nn.init import materialize
from nxtrain.parallel.native import NativeLayers
from nxtrain.parallel.regions import TensorParallel
from nxtrain.sharding import Layout, ParamTable

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
"""Largest difference of a score that rounding explains, by the type of the weights."""


def open_model(path: Place, backend: Backend, seq_len: int) -> CausalLM:
    """Build the model of a checkpoint on a backend of one rank and read its weights.

    Args:
        path: The checkpoint's folder.
        backend: Where it lives.
        seq_len: Longest sequence.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    meta = read_meta(path)
    family, config = meta.model()
    mesh, dtype = Mesh(1, 0), getattr(torch, meta.dtype)
    layers = NativeLayers(TensorParallel(mesh.tp, backend.collectives, dtype))
    model = family.build(config, BuildContext(layers, backend.kernels, dtype, seq_len))
    materialize(model, backend.put, fill=None)
    load(path, {MODEL: dict(model.named_parameters())}, Layout(ParamTable.of(model), mesh))
    return cast(CausalLM, model)


def open_hf_model(path: Path, backend: Backend, seq_len: int) -> CausalLM:
    """Build the model of a Hugging Face folder on a backend of one rank and read its weights.

    Args:
        path: The folder.
        backend: Where it lives.
        seq_len: Longest sequence.

    Raises:
        ConfigError: The folder is unreadable, of an unknown family, or its tensors do not fit its configuration.
        CheckpointError: Its weights are not all finite.
    """
    folder = HfFolder(path)
    family = find_family(str(folder.config.get("model_type")))
    config = family.from_hf(folder.config)
    mesh = Mesh(1, 0)
    # A CPU computes no float16 attention, and float32 holds it exactly.
    dtype = torch.float32 if folder.dtype == torch.float16 else folder.dtype
    layers = NativeLayers(TensorParallel(mesh.tp, backend.collectives, dtype))
    model = family.build(config, BuildContext(layers, backend.kernels, dtype, seq_len))
    table = ParamTable.of(model)
    weights = HfWeights(path, table, mesh.tp, table.global_shapes())
    materialize(model, backend.put, weights)
    weights.check()
    return cast(CausalLM, model)


def verify_export(checkpoint: Place, folder: Path, backend: Backend) -> float:
    """Largest difference between our scores and those of transformers on an exported folder.

    Args:
        checkpoint: What was exported.
        folder: The export.
        backend: Where our model runs.

    Raises:
        CheckpointError: transformers is absent, cannot load the folder, or computes something else.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise CheckpointError("--verify needs transformers: pip install transformers") from error
    meta = read_meta(checkpoint)
    logging.disable_progress_bar()  # transformers shows one for each tensor that it reads
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, meta.dtype))
    length = min(64, theirs.config.max_position_embeddings)
    tokens = torch.randint(0, theirs.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits.float()
        scores = open_model(checkpoint, backend, length).logits(backend.put(tokens)).cpu()
    difference = float((scores - expected).abs().max())
    if not difference <= TOLERANCE[meta.dtype]:
        raise CheckpointError(f"{folder}: scores of transformers differ from ours by {difference:.3g}; do not use it")
    return difference
