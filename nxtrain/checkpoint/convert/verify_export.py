"""Models with weights of a checkpoint or a Hugging Face folder, and the check of an export with transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.checkpoint.convert.hf_folder import HfFolder, HfWeights
from nxtrain.checkpoint.convert.peft import merged_checkpoint
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.shards import MODEL
from nxtrain.common.errors import CheckpointError
from nxtrain.common.family import BuildContext, CausalLM, find_family
from nxtrain.common.io.object_store import Location
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.nn.init import materialize
from nxtrain.parallel.native import NativeLayers
from nxtrain.parallel.regions import TensorParallel

EXACT = 1e-4
"""Largest allowed difference of a logit in float32, which covers different orders of summation."""

ROUNDING, WORST_ROUNDING = 1.5, 2.0
"""Largest allowed error of nxtrain's logits relative to that of transformers: over all tokens, and at the worst token.

Errors are root mean square differences from transformers in float32 with the same weights.
"""

_TOKENS = 256

_ALONE = Mesh(1, 0)


@dataclass(frozen=True)
class Agreement:
    """Result of comparing the logits of nxtrain with those of transformers.

    Args:
        difference: Largest difference of a logit.
        rounding: Root mean square error of nxtrain divided by that of transformers; 0 for float32.
    """

    difference: float
    rounding: float = 0.0


def open_model(path: Location, backend: Backend, seq_len: int, mesh: Mesh = _ALONE) -> CausalLM:
    """Build the model of a checkpoint and load this rank's weights; an adapter is merged into its base.

    Every rank calls this. The mesh must have one pipeline stage.
    """
    meta = read_meta(path)
    if meta.adapter:
        return _open_folder(merged_checkpoint(path)[1], backend, seq_len, mesh)
    family, config = meta.model()
    dtype = getattr(torch, meta.dtype)
    layers = _layers(backend, mesh, dtype)
    model = family.build(config, BuildContext(layers, backend.kernels, dtype, seq_len))
    materialize(model, backend.put, fill=None)
    load(path, {MODEL: dict(model.named_parameters())}, Layout(ParamTable.of(model), mesh))
    return cast(CausalLM, model)


def open_hf_model(path: Path, backend: Backend, seq_len: int, mesh: Mesh = _ALONE) -> CausalLM:
    """Build the model of a Hugging Face folder and load this rank's weights."""
    return _open_folder(HfFolder(path), backend, seq_len, mesh)


def _layers(backend: Backend, mesh: Mesh, dtype: torch.dtype) -> NativeLayers:
    return NativeLayers(TensorParallel(mesh.tp, backend.collectives, backend.kernels, dtype))


def _open_folder(folder: HfFolder, backend: Backend, seq_len: int, mesh: Mesh) -> CausalLM:
    family = find_family(str(folder.config.get("model_type")))
    config = family.from_hf(folder.config)
    # A CPU computes no float16 attention, and float32 holds float16 exactly.
    dtype = folder.dtype
    if dtype == torch.float16:
        dtype = torch.float32
    layers = _layers(backend, mesh, dtype)
    model = family.build(config, BuildContext(layers, backend.kernels, dtype, seq_len))
    table = ParamTable.of(model)
    weights = HfWeights(folder, table, mesh.tp, table.global_shapes())
    materialize(model, backend.put, weights)
    weights.check()
    return cast(CausalLM, model)


def verify_export(checkpoint: Location, folder: Path, backend: Backend) -> Agreement:
    """Compare nxtrain's logits of a checkpoint with transformers' logits of its export.

    In float32 the difference of the logits has a bound. In narrower types rounding depends on the model. There the
    errors of both implementations against transformers in float32 are compared.

    Raises:
        CheckpointError: The logits differ by more than rounding.
    """
    meta = read_meta(checkpoint)
    _, config = meta.model()
    length = min(_TOKENS, config.longest_sequence[1])
    tokens = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    theirs = _scores_of_transformers(meta.family, folder, tokens, getattr(torch, meta.dtype))
    with torch.no_grad():
        ours = open_model(checkpoint, backend, length).logits(backend.put(tokens)).cpu().float()
    difference = float((ours - theirs).abs().max())
    summary = f"{folder}: scores of transformers differ from ours by {difference:.3g}"
    if meta.dtype == "float32":
        if not difference <= EXACT:
            raise CheckpointError(f"{summary}, more than {EXACT:g}; do not use this export")
        return Agreement(difference)
    exact = _scores_of_transformers(meta.family, folder, tokens, torch.float32)
    # Root mean square error of each token's scores.
    errors, peer_errors = ((scores - exact).square().mean(-1).sqrt().flatten() for scores in (ours, theirs))
    # Also false for NaN.
    if not (_mean(errors) <= ROUNDING * _mean(peer_errors) and errors.max() <= WORST_ROUNDING * peer_errors.max()):
        raise CheckpointError(
            f"{summary}. The error is {_mean(errors):.3g} here and {_mean(peer_errors):.3g} in transformers, "
            f"at the worst token {float(errors.max()):.3g} and {float(peer_errors.max()):.3g}. Rounding explains up to "
            f"{ROUNDING:g} times the error of transformers, at the worst token {WORST_ROUNDING:g}; do not use it"
        )
    return Agreement(difference, _mean(errors) / max(_mean(peer_errors), torch.finfo(torch.float32).tiny))


def of_type(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Keyword argument of transformers for the type of a model's weights, `torch_dtype` before transformers 4.56."""
    from transformers import PretrainedConfig

    return {"dtype" if hasattr(PretrainedConfig(), "dtype") else "torch_dtype": dtype}


def _scores_of_transformers(family: str, folder: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    try:
        import transformers
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise CheckpointError("--verify needs transformers: pip install transformers") from error
    if family not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"--verify: transformers {transformers.__version__} has no {family}; "
            f"compare {folder} in an environment with a newer one"
        )
    disable_progress_bar()  # transformers shows one for each tensor that it reads
    with torch.no_grad(), _without_device_choice():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **of_type(dtype))
        if hasattr(model, "set_experts_implementation"):
            # Torch's grouped product, the default, needs matrices whose rows are multiples of 16 bytes.
            model.set_experts_implementation("eager")
        scores: Tensor = model(input_ids=tokens).logits.float()
    return scores


@contextmanager
def _without_device_choice() -> Iterator[None]:
    """Suppress torch-xla's log line about its device, which accelerate causes when it loads weights."""
    root = logging.getLogger()
    root.addFilter(_is_no_device_choice)
    try:
        yield
    finally:
        root.removeFilter(_is_no_device_choice)


def _is_no_device_choice(record: logging.LogRecord) -> bool:
    return "PJRT_DEVICE" not in record.getMessage()


def _mean(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())
