"""Conversion between checkpoints and Hugging Face folders.

Tensors are streamed: an import holds one tensor in memory, and an export holds some rows of a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.convert.hf_folder import HfFolder, NonFiniteCollector, read_object, write_json
from nxtrain.checkpoint.convert.peft import MergedFolder, copy_companions, merged_checkpoint
from nxtrain.checkpoint.convert.stacked_experts import ReadShards, stacked
from nxtrain.checkpoint.convert.streamed import write_streamed
from nxtrain.checkpoint.load import open_checkpoint, read_shards, whole_weights
from nxtrain.checkpoint.meta import Meta, fingerprint
from nxtrain.checkpoint.mirror import locate_checkpoint
from nxtrain.checkpoint.save import read_back, write
from nxtrain.checkpoint.shards import MODEL, TensorShard
from nxtrain.checkpoint.staging import LazyTensors, Staged
from nxtrain.checkpoint.tokenizer_files import tokenizer_files
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.errors import CheckpointError, ConfigError, DamagedError, refused
from nxtrain.common.family import BuildContext, ModelConfig, ModelFamily, find_family
from nxtrain.common.hf_files import COMPANIONS, CONFIG, GENERATION_CONFIG, INDEX, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS
from nxtrain.common.io.atomic import write_durably
from nxtrain.common.io.object_store import Location
from nxtrain.common.io.regular import read_bytes
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import ParamTable
from nxtrain.data.tokenization import declared_end
from nxtrain.parallel.native import NativeLayers
from nxtrain.parallel.regions import TensorParallel

CHECKPOINT_FILES = (directory.META, *COMPANIONS, directory.MANIFEST, directory.VERIFIED, "rank-*.safetensors")
"""Name patterns of the files in a checkpoint's folder."""

_EXPORTED_FILES = (
    CONFIG,
    INDEX,
    "model*.safetensors",
    *COMPANIONS,
)
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_BEGIN = ("<|begin_of_text|>", "<s>")
_END = ("<|endoftext|>", "<|end_of_text|>", "</s>")


def hf_to_nxtrain(src: Path, dst: Path) -> None:
    """Import a Hugging Face folder: write its weights as a checkpoint at step 0."""
    folder = HfFolder(src)
    family = find_family(str(folder.config.get("model_type")))
    config = family.from_hf(folder.config)
    wanted = whole_shapes(family, config)
    folder.check(wanted)
    refuse_to_overwrite(dst, CHECKPOINT_FILES)
    tensors = [TensorShard.whole(name, shape, folder.dtype) for name, shape in wanted.items()]
    finiteness = NonFiniteCollector(src)

    def read(chunk: TensorShard) -> torch.Tensor:
        tensor = folder.read(chunk.name)
        finiteness.note(chunk.name, tensor)
        return tensor.to(chunk.dtype)

    meta = Meta(
        step=0,
        samples=0,
        tokens=0,
        seed=0,
        family=family.name,
        config=config.model_dump(mode="json"),
        dtype=dtype_name(folder.dtype),
        mesh={"pp": 1, "dp": 1, "tp": 1},
        kinds=(MODEL,),
    )
    file = src / TOKENIZER
    tokenizer = None
    update: dict[str, Any] = {"settings": _declared_ids(folder)}
    if file.is_file():
        tokenizer = file
        update["tokenizer_fingerprint"] = fingerprint([read_bytes(file)])
        update["end_of_text"] = declared_end(file)
    meta = meta.model_copy(update=update)
    alone = StorageScope(Ranks(Mesh(1, 0)))
    written = write(dst, Staged(LazyTensors(tensors, read)), meta, alone, tokenizer, finiteness.check)
    read_back(dst, written, alone)


def nxtrain_to_hf(
    src: Path | str, dst: Path, *, max_shard_bytes: int = 5_000_000_000, base: Path | None = None
) -> Location:
    """Export a checkpoint as a Hugging Face folder that `transformers` loads; a LoRA adapter is merged into its base.

    Args:
        src: Path or address of a checkpoint, or a `checkpoints` or run folder, whose newest checkpoint is exported.
        dst: Folder to create.
        max_shard_bytes: Largest weight file in bytes, unless a single tensor is larger.
        base: Folder of the base weights of an adapter; None for the folder in the run's configuration.

    Returns:
        The exported checkpoint.
    """
    checkpoint = locate_checkpoint(src)
    meta, manifest = open_checkpoint(checkpoint)
    if meta.adapter:
        write_merged(merged_checkpoint(checkpoint, base)[1], dst, max_shard_bytes=max_shard_bytes)
        return checkpoint
    family, config = meta.model()
    refuse_to_overwrite(dst, _EXPORTED_FILES)
    with new_folder(dst) as out:
        given = whole_weights(manifest), partial(read_shards, checkpoint, manifest)
        _write_weights(*stacked(*given, family.dimensions(config).mixture), out, max_shard_bytes)
        ids = _write_tokenizer(checkpoint, out, meta)
        write_json(out / CONFIG, {**family.to_hf(config, meta.dtype), **ids})
    return checkpoint


def _declared_ids(folder: HfFolder) -> dict[str, dict[str, Any]]:
    """Read the ids of special tokens from a Hugging Face folder, by JSON file; a role may have several ids."""
    ids = {key: folder.config[key] for key in _IDS if folder.config.get(key) is not None}
    file = folder.path / GENERATION_CONFIG
    if not file.is_file():
        return {CONFIG: ids, GENERATION_CONFIG: ids}
    content = read_object(file)
    ids_of_text = {key: content[key] for key in _IDS if content.get(key) is not None}
    return {CONFIG: ids, GENERATION_CONFIG: ids_of_text}


def whole_shapes(family: ModelFamily, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Unsharded shape of every tensor of a model, by global name."""
    kernels = FusedKernels()
    alone = TensorParallel(Mesh(1, 0).tp, C10dCollectives(1), kernels, torch.float32)
    context = BuildContext(NativeLayers(alone), kernels, torch.float32, seq_len=1)
    return ParamTable.of(family.build(config, context)).global_shapes()


def write_merged(folder: MergedFolder, dst: Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write base weights with a merged LoRA adapter as a Hugging Face folder."""
    refuse_to_overwrite(dst, _EXPORTED_FILES)
    chunks = [TensorShard.whole(name, shape, folder.dtype) for name, shape in folder.shapes.items()]

    def read(targets: Mapping[TensorShard, Tensor]) -> None:
        for chunk, target in targets.items():
            target.copy_(folder.read(chunk.name, 0, chunk.block.offsets[0], chunk.block.sizes[0]))

    with new_folder(dst) as out:
        _write_weights(*stacked(chunks, read, folder.mixture), out, max_shard_bytes)
        copy_companions(folder.path, out, dtype_name(folder.dtype))


def _write_weights(chunks: Sequence[TensorShard], read: ReadShards, out: Path, max_bytes: int) -> None:
    files = list(_split(chunks, max_bytes))
    if len(files) == 1:
        write_durably(out / WEIGHTS, partial(write_streamed, tensors=chunks, read=read))
        return
    file_of: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_durably(out / name, partial(write_streamed, tensors=part, read=read))
        file_of.update({chunk.name: name for chunk in part})
    total = sum(chunk.num_bytes for chunk in chunks)
    write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})


def _split(chunks: Sequence[TensorShard], max_bytes: int) -> Iterator[list[TensorShard]]:
    """Group weights into files of at most `max_bytes`; a larger tensor gets its own file."""
    file: list[TensorShard] = []
    for chunk in chunks:
        if file and sum(c.num_bytes for c in file) + chunk.num_bytes > max_bytes:
            yield file
            file = []
        file.append(chunk)
    yield file


def _write_tokenizer(checkpoint: Location, out: Path, meta: Meta) -> dict[str, Any]:
    """Write a checkpoint's tokenizer and its companions to a Hugging Face folder.

    Companions that the checkpoint does not have are made of the names of the tokenizer's special tokens.

    Returns:
        Ids of special tokens for `config.json`, by key; None for a token that the tokenizer does not have.
    """
    files: dict[str, bytes] = {}
    if (checkpoint / TOKENIZER).is_file():
        files = tokenizer_files(checkpoint)
    try:
        added: dict[str, int] = {}
        if files:
            added = {str(token["content"]): int(token["id"]) for token in json.loads(files[TOKENIZER])["added_tokens"]}
        generation = json.loads(files.get(GENERATION_CONFIG, b"{}"))
        declared = {key: generation[key] for key in _IDS if generation.get(key) is not None}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        reason = f"its tokenizer or {GENERATION_CONFIG} is not in the format of Hugging Face: {error!r}"
        raise DamagedError(f"{checkpoint}", reason) from error
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    tokens: dict[str, str] = {}
    for role, names in (("bos", _BEGIN), ("eos", (meta.end_of_text, *_END))):
        for name in names:
            if name in added:
                ids[f"{role}_token_id"] = added[name]
                tokens[f"{role}_token"] = name
                break
    for name, content in files.items():
        (out / name).write_bytes(content)
    if files and TOKENIZER_CONFIG not in files:
        write_json(out / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    if GENERATION_CONFIG not in files:
        known = {key: value for key, value in ids.items() if value is not None}
        write_json(out / GENERATION_CONFIG, {**known, **meta.settings.get(GENERATION_CONFIG, {})})
    return {**ids, **declared, **meta.settings.get(CONFIG, {})}


@contextmanager
def new_folder(dst: Path) -> Iterator[Path]:
    """Context with a temporary folder to fill: success renames the folder to `dst`, and an error deletes the folder."""
    staged: Path | None = None
    try:
        staged = directory.prepare(dst)
        yield staged
        directory.publish(staged, dst)
    except OSError as error:
        raise refused(error, f"{dst} cannot be written") from error
    except SafetensorError as error:
        raise CheckpointError(f"{dst} cannot be written: {error}") from error
    finally:
        if staged is not None:
            directory.discard(staged)


def refuse_to_overwrite(dst: Path, patterns: tuple[str, ...]) -> None:
    """Raise an error if the target folder contains files that no conversion wrote, or cannot be written.

    Args:
        dst: Target folder.
        patterns: Name patterns of the files that the conversion writes.
    """
    if dst.exists() and not dst.is_dir():
        raise ConfigError(f"{dst} is a file, but a conversion writes a folder; give a new folder")
    if dst.exists():
        for path in dst.iterdir():
            if not any(fnmatch(path.name, pattern) for pattern in patterns):
                raise ConfigError(f"{dst} exists and holds {path.name}, which no conversion wrote; give a new folder")
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=dst.parent).close()
    except OSError as error:
        raise refused(error, f"{dst} cannot be written") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch type without the prefix `torch.`, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
