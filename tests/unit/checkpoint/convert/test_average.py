"""Means of checkpoints, next to numpy's."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nxtrain.checkpoint.convert.average import average, running_mean, sources_of
from nxtrain.checkpoint.convert.hf import dtype_name
from nxtrain.checkpoint.load import open_checkpoint, read_shards, whole_weights
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.checkpoint.save import write
from nxtrain.checkpoint.shards import MODEL, TensorShard
from nxtrain.checkpoint.staging import Staged
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import CheckpointError, ConfigError
from nxtrain.common.hf_files import TOKENIZER
from nxtrain.common.mesh import Mesh
from tests.support.commands import in_process
from tests.support.object_stores import BUCKET, s3, s3_variables

__all__ = ["s3", "s3_variables"]

SHAPES = {"model.embed_tokens.weight": (33, 8), "model.norm.weight": (8,), "lm_head.weight": (33, 8)}


def saved(run: Path, step: int, dtype: torch.dtype = torch.float32, **fields: Any) -> dict[str, Tensor]:
    """Write a checkpoint of random weights and of optimizer state into a run folder; return the weights."""
    generator = torch.Generator().manual_seed(step)
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    tensors = {TensorShard.whole(name, tuple(x.shape), dtype): x for name, x in weights.items()}
    meta = Meta(
        step=step, samples=8 * step, tokens=64 * step, seed=3, family="llama", config={"a": 1}, dtype=dtype_name(dtype)
    )
    tokenizer = run / "given.json"
    run.mkdir(exist_ok=True)
    tokenizer.write_text("{}")
    folder = run / "checkpoints" / f"step-{step:08d}"
    write(folder, Staged(tensors), meta.model_copy(update=fields), StorageScope(Ranks(Mesh(1, 0))), tokenizer)
    return weights


def loaded(checkpoint: Path) -> dict[str, Tensor]:
    _, manifest = open_checkpoint(checkpoint)
    targets = {shard: torch.empty(shard.shape, dtype=shard.dtype) for shard in whole_weights(manifest)}
    read_shards(checkpoint, manifest, targets)
    return {shard.name: tensor for shard, tensor in targets.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [2, 3, 7])
def test_means_are_those_of_numpy_bit_for_bit(tmp_path: Path, dtype: torch.dtype, number: int) -> None:
    given = [saved(tmp_path / "run", step, dtype) for step in range(1, number + 1)]
    average(sources_of([str(tmp_path / "run")]), tmp_path / "mean")
    result = loaded(tmp_path / "mean")
    assert result.keys() == SHAPES.keys()
    for name, tensor in result.items():
        mean = np.stack([weights[name].float().numpy() for weights in given]).mean(axis=0, dtype=np.float32)
        assert torch.equal(tensor, torch.from_numpy(mean).to(dtype)), name
    meta = read_meta(tmp_path / "mean")
    assert (meta.step, meta.samples, meta.kinds, meta.dtype) == (0, 0, (MODEL,), dtype_name(dtype))
    assert (tmp_path / "mean" / TOKENIZER).read_text() == "{}"


@pytest.mark.parametrize("prefix", ["mirror", "run/checkpoints"])
def test_a_folder_in_a_bucket_gives_all_its_checkpoints(tmp_path: Path, s3: Any, prefix: str) -> None:
    for step in (1, 2, 10):
        saved(tmp_path / "run", step)
    for file in (tmp_path / "run/checkpoints").rglob("*"):
        if file.is_file():
            s3.upload_file(str(file), BUCKET, f"{prefix}/{file.relative_to(tmp_path / 'run/checkpoints')}")
    address = f"s3://{BUCKET}/{prefix.removesuffix('/checkpoints')}"
    assert [source.name for source in sources_of([address])] == ["step-00000001", "step-00000002", "step-00000010"]
    assert [source.name for source in sources_of([address], 2)] == ["step-00000002", "step-00000010"]
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        sources_of([f"{address}/none", address])


def test_steps_and_the_last_of_a_run_are_chosen(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 10):
        saved(run, step)
    steps = [str(run / "checkpoints" / f"step-{step:08d}") for step in (1, 10)]
    assert [source.name for source in sources_of(steps)] == ["step-00000001", "step-00000010"]
    assert [source.name for source in sources_of([str(run)], 2)] == ["step-00000002", "step-00000010"]
    with pytest.raises(ConfigError, match="1 checkpoint, but an average needs two or more"):
        sources_of(steps[:1])
    with pytest.raises(CheckpointError):
        sources_of([str(tmp_path / "absent"), steps[0]])


@pytest.mark.parametrize(("field", "value"), [("config", {"a": 2}), ("tokenizer_fingerprint", "x")])
def test_checkpoints_of_different_models_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    saved(tmp_path / "run", 1)
    saved(tmp_path / "run", 2, **{field: value})
    with pytest.raises(CheckpointError, match=rf"step-00000002 and .*step-00000001 differ in {field}"):
        average(sources_of([str(tmp_path / "run")]), tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_a_checkpoint_and_its_copy_count_once(tmp_path: Path) -> None:
    """As a run folder and its mirror have them."""
    for step in (1, 2):
        saved(tmp_path / "run", step)
    shutil.copytree(tmp_path / "run/checkpoints", tmp_path / "mirror")
    run, mirror = (str(tmp_path / name) for name in ("run", "mirror"))
    average(sources_of([run]), tmp_path / "mean")
    average(sources_of([run, mirror, f"{run}/checkpoints/step-00000002"]), tmp_path / "same")
    means = loaded(tmp_path / "mean")
    for name, tensor in loaded(tmp_path / "same").items():
        assert torch.equal(tensor, means[name]), name
    with pytest.raises(ConfigError, match="name 1 checkpoint, but an average needs two"):
        sources_of([f"{run}/checkpoints/step-00000002", f"{mirror}/step-00000002"])


def test_the_command_says_which_steps_it_took(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path / "run", step)
    code, printed, _ = in_process("convert", "average", tmp_path / "run", tmp_path / "mean", "--last", "2")
    assert code == 0 and "step-00000002, step-00000003" in printed
    assert in_process("convert", "average", tmp_path / "absent", tmp_path / "other")[0] != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_running_mean_is_a_checkpoint_in_the_type_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = saved(tmp_path / "run", 4, dtype, kinds=(MODEL,))
    source = tmp_path / "run" / "checkpoints" / "step-00000004"
    with pytest.raises(CheckpointError, match=r"holds model, but no running mean of the weights; .*optim\.ema_decay"):
        running_mean(source, tmp_path / "none")
    means = {name: weight.float() + 1.0 / 3.0 for name, weight in weights.items()}
    tensors = {TensorShard.whole(name, tuple(x.shape), dtype): x for name, x in weights.items()}
    for name, mean in means.items():
        tensors[replace(TensorShard.whole(name, tuple(mean.shape), torch.float32), kind="ema")] = mean
    meta = read_meta(source).model_copy(update={"kinds": (MODEL, "ema"), "step": 5})
    newer = source.with_name("step-00000005")
    write(newer, Staged(tensors), meta, StorageScope(Ranks(Mesh(1, 0))), tmp_path / "run" / "given.json")
    code, printed, _ = in_process("convert", "ema", newer, tmp_path / "mean")
    assert code == 0 and "running mean of the weights" in printed
    result = loaded(tmp_path / "mean")
    assert all(torch.equal(result[name], mean.to(dtype)) for name, mean in means.items())
    written = read_meta(tmp_path / "mean")
    assert (written.step, written.kinds, written.dtype) == (0, (MODEL,), dtype_name(dtype))
