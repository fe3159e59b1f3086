"""Averages of model weights: the mean of several checkpoints, or the running mean (EMA) in one checkpoint.

Tensors are streamed: memory holds one tensor of one checkpoint, and the sum over checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.convert.hf import CHECKPOINT_FILES, refuse_to_overwrite
from nxtrain.checkpoint.load import open_checkpoint, read_shards, whole_weights
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.checkpoint.mirror import checkpoints_in, locate_checkpoint
from nxtrain.checkpoint.save import read_back, write
from nxtrain.checkpoint.shards import MODEL, TensorShard
from nxtrain.checkpoint.staging import LazyTensors, Staged
from nxtrain.checkpoint.tokenizer_files import tokenizer_files
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import CheckpointError, ConfigError
from nxtrain.common.hf_files import CONFIG, GENERATION_CONFIG, TOKENIZER
from nxtrain.common.io.object_store import Location, location_of
from nxtrain.common.mesh import Mesh
from nxtrain.optim.adamw import EMA

_EQUAL = ("family", "config", "dtype", "adapter", "base_fingerprint", "tokenizer_fingerprint")
"""Metadata fields that must be equal in all averaged checkpoints."""


def sources_of(addresses: Sequence[str], last: int = 0) -> list[Location]:
    """List the checkpoints to average: each address is a checkpoint, or a run folder with several checkpoints.

    A checkpoint that several addresses name, such as a run folder and its mirror, is listed once.

    Args:
        addresses: Run folders, `checkpoints` folders, mirrors and checkpoints, on disks or in buckets.
        last: Number of newest checkpoints per folder; 0 for all.

    Raises:
        ConfigError: The addresses name fewer than two checkpoints.
    """
    sources: list[Location] = []
    for address in addresses:
        location = location_of(address)
        if (location / directory.META).is_file():
            sources.append(location)
            continue
        found = checkpoints_in(location)
        if not found and not (isinstance(location, Path) and location.is_dir()):
            locate_checkpoint(address)  # raises the error of an address without a checkpoint
        sources += found[-last:]
    sources = _distinct(sources)
    if len(sources) < 2:  # noqa: PLR2004 - the fewest that have a mean
        raise ConfigError(
            f"{', '.join(addresses)} name {len(sources)} checkpoint, but an average needs two or more; "
            "name steps, such as RUN/checkpoints/step-00000100, or a run folder with several"
        )
    return sources


def _distinct(sources: Sequence[Location]) -> list[Location]:
    """Leave out copies of checkpoints that come earlier in the list."""
    known: dict[tuple[int, int], Location] = {}
    for source in sources:
        meta = read_meta(source)
        known.setdefault((meta.step, meta.manifest_crc32), source)
    return list(known.values())


def average(sources: Sequence[Location], dst: Path) -> None:
    """Average the weights of several checkpoints, and write the mean as a checkpoint at step 0.

    The mean is computed in float32, and rounded once to the type of the weights.

    Args:
        sources: Checkpoints of one model with one tokenizer.
        dst: Folder to create.

    Raises:
        CheckpointError: The checkpoints are of different models, or cannot be read or written.

    Source: Izmailov et al. 2018 (arXiv:1803.05407), section 3.
    """
    opened = [open_checkpoint(source) for source in sources]
    first, _ = opened[0]
    for source, (meta, _) in zip(sources, opened, strict=True):
        differing = [field for field in _EQUAL if getattr(meta, field) != getattr(first, field)]
        if differing:
            raise CheckpointError(
                f"{source} and {sources[0]} differ in {', '.join(differing)}; "
                "average checkpoints of one model only, such as steps of one run"
            )

    def read(chunk: TensorShard) -> Tensor:
        total = torch.zeros(chunk.block.sizes, dtype=torch.float32)
        part = torch.empty(chunk.block.sizes, dtype=chunk.dtype)
        for source, (_, manifest) in zip(sources, opened, strict=True):
            read_shards(source, manifest, {chunk: part})
            total += part.float()
        return (total / len(sources)).to(chunk.dtype)

    _write(dst, LazyTensors(whole_weights(opened[0][1]), read), sources[-1], opened[-1][0])


def running_mean(source: Location, dst: Path) -> None:
    """Write a checkpoint's running mean (EMA) of the weights as a checkpoint at step 0, in the weights' type.

    Raises:
        CheckpointError: The checkpoint has no running mean, or a checkpoint cannot be read or written.
    """
    meta, manifest = open_checkpoint(source)
    if EMA not in meta.kinds:
        hint = "train with optim.ema_decay, or average several checkpoints: nxtrain convert average SRC... DST"
        raise CheckpointError(f"{source} holds {', '.join(meta.kinds)}, but no running mean of the weights; {hint}")

    def read(chunk: TensorShard) -> Tensor:
        mean = torch.empty(chunk.block.sizes, dtype=torch.float32)
        read_shards(source, manifest, {replace(chunk, kind=EMA, dtype=torch.float32): mean})
        return mean.to(chunk.dtype)

    _write(dst, LazyTensors(whole_weights(manifest), read), source, meta)


def _write(dst: Path, weights: LazyTensors, source: Location, meta: Meta) -> None:
    """Write weights as a checkpoint at step 0, with the metadata and the tokenizer of a source checkpoint."""
    refuse_to_overwrite(dst, CHECKPOINT_FILES)
    alone = StorageScope(Ranks(Mesh(1, 0)))
    of_weights = Meta(
        step=0,
        samples=0,
        tokens=0,
        seed=meta.seed,
        family=meta.family,
        config=meta.config,
        adapter=meta.adapter,
        base=meta.base,
        base_fingerprint=meta.base_fingerprint,
        dtype=meta.dtype,
        settings={key: meta.settings[key] for key in (CONFIG, GENERATION_CONFIG) if key in meta.settings},
        tokenizer_fingerprint=meta.tokenizer_fingerprint,
        end_of_text=meta.end_of_text,
        mesh={"pp": 1, "dp": 1, "tp": 1},
        kinds=(MODEL,),
    )
    with _tokenizer(source) as tokenizer:
        written = write(dst, Staged(weights), of_weights, alone, tokenizer)
    read_back(dst, written, alone)


@contextmanager
def _tokenizer(source: Location) -> Iterator[Path | None]:
    """Context with a local copy of a checkpoint's tokenizer and its companions; None without a tokenizer."""
    if not (source / TOKENIZER).is_file():
        yield None
        return
    with TemporaryDirectory() as folder:
        for name, content in tokenizer_files(source).items():
            (Path(folder) / name).write_bytes(content)
        yield Path(folder) / TOKENIZER
