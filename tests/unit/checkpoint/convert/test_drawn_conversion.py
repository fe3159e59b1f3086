"""Drawn shapes keep every bit on the way into checkpoints and NeuronX Distributed's files, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from safetensors.torch import load_file

from nxtrain.checkpoint.convert.hf import hf_to_nxtrain, nxtrain_to_hf
from nxtrain.checkpoint.convert.hf_folder import HfFolder
from nxtrain.checkpoint.convert.nxd_read import nxd_to_nxtrain
from nxtrain.checkpoint.convert.nxd_write import NxdTarget, nxtrain_to_nxd
from nxtrain.common.errors import ConfigError
from tests.support.drawn import SEED, Drawn, draw
from tests.support.drawn_runs import first_weights
from tests.support.layouts import Degrees
from tests.support.models import MIXTURES, hf_model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a Hugging Face folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def differing(a: Path, b: Path) -> list[str]:
    """Names of the tensors of which two folders have other bits."""
    one, other = tensors(a), tensors(b)
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def export(run: Drawn, folder: Path) -> None:
    """Write the model of a run as transformers does, in the type of its parameters."""
    dtype = torch.bfloat16 if run.resolved.config.precision.params == "bf16" else torch.float32
    hf_model(run.resolved, weights=first_weights(run)).to(dtype).save_pretrained(folder)


@pytest.mark.parametrize("index", range(20))
def test_a_drawn_model_comes_back_from_a_checkpoint_bit_for_bit(tmp_path: Path, index: int) -> None:
    run = draw("conversion", SEED, index, bf16=index % 2 == 1)
    export(run, tmp_path / "hf")
    hf_to_nxtrain(tmp_path / "hf", tmp_path / "checkpoint")
    nxtrain_to_hf(tmp_path / "checkpoint", tmp_path / "back", max_shard_bytes=20_000)
    assert differing(tmp_path / "hf", tmp_path / "back") == []


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("index", range(6))
def test_a_drawn_model_with_experts_comes_back_from_a_checkpoint_bit_for_bit(
    tmp_path: Path, index: int, stacked: bool
) -> None:
    """transformers writes a matrix of each expert, or one tensor of all, and reads either."""
    run = draw("mixture conversion", SEED, index, bf16=index % 2 == 1, family=MIXTURES[index // 2 % 2])
    export(run, tmp_path / "hf")
    if stacked:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
        model.save_pretrained(tmp_path / "stacked", save_original_format=False)
        assert any(name.endswith("experts.down_proj") for name in tensors(tmp_path / "stacked"))
        hf_to_nxtrain(tmp_path / "stacked", tmp_path / "checkpoint")
    else:
        hf_to_nxtrain(tmp_path / "hf", tmp_path / "checkpoint")
    nxtrain_to_hf(tmp_path / "checkpoint", tmp_path / "back", max_shard_bytes=20_000)
    assert differing(tmp_path / "hf", tmp_path / "back") == []


@pytest.mark.parametrize("index", range(4))
def test_a_drawn_gpt_oss_comes_back_from_a_checkpoint_bit_for_bit(tmp_path: Path, index: int) -> None:
    """Files have one tensor for all experts, transposed, whose columns are gate and values by turns."""
    run = draw("gpt-oss conversion", SEED, index, bf16=index % 2 == 1, family="gpt_oss")
    export(run, tmp_path / "hf")
    assert any(name.endswith("experts.gate_up_proj_bias") for name in tensors(tmp_path / "hf"))
    hf_to_nxtrain(tmp_path / "hf", tmp_path / "checkpoint")
    nxtrain_to_hf(tmp_path / "checkpoint", tmp_path / "back", max_shard_bytes=20_000)
    assert differing(tmp_path / "hf", tmp_path / "back") == []


def test_ranks_read_their_part_of_stacked_experts(tmp_path: Path) -> None:
    """Any rows of any dimension, as ranks of tp and of ep read them."""
    run = draw("gpt-oss parts", SEED, 0, family="gpt_oss")
    weights = first_weights(run)
    hf_model(run.resolved, weights=weights).save_pretrained(tmp_path)
    folder, rng = HfFolder(tmp_path), Random(1)
    for name, whole in weights.items():
        if ".experts." in name:
            dim = rng.randrange(whole.dim())
            start = rng.randrange(whole.shape[dim])
            length = rng.randint(1, whole.shape[dim] - start)
            assert torch.equal(folder.read(name, dim, start, length), whole.narrow(dim, start, length)), name


def test_weights_in_mxfp4_are_refused_with_a_way_out(tmp_path: Path) -> None:
    run = draw("gpt-oss parts", SEED, 0, family="gpt_oss")
    export(run, tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match=r"mxfp4.*dequantize"):
        hf_to_nxtrain(tmp_path / "hf", tmp_path / "checkpoint")


def suiting_nxd(run: Drawn) -> Drawn:
    """The run with sizes that NxD's Llama can hold: heads that fill the hidden size, and cuts without padding."""
    model, tp = run.resolved.model.model_dump(), run.degrees.tp
    sizes = {
        "hidden_size": model["num_attention_heads"] * model["head_dim"],
        "vocab_size": tp * -(-model["vocab_size"] // tp),
        "intermediate_size": tp * -(-model["intermediate_size"] // tp),
        "num_hidden_layers": run.degrees.pp * model["num_hidden_layers"],
    }
    return replace(run, overrides=(*run.overrides, *(f"model.config.{key}={size}" for key, size in sizes.items())))


def test_drawn_models_come_back_from_the_files_of_nxd_bit_for_bit(tmp_path: Path) -> None:
    """Of the layouts that NxD has a place for; how many were refused stands in the assertion."""
    rng, taken, refused = Random(SEED), 0, list[str]()
    for index in range(20):
        degrees = Degrees(tp=rng.choice((1, 2, 4)), pp=rng.choice((1, 2, 3)), dp=rng.choice((1, 2)))
        run = suiting_nxd(draw("nxd conversion", SEED, index, degrees, bf16=index % 2 == 1, family="llama"))
        folder = tmp_path / str(index)
        export(run, folder / "hf")
        hf_to_nxtrain(folder / "hf", folder / "checkpoint")
        copies = rng.choice((0, 0, degrees.tp))
        target = NxdTarget(degrees.tp, degrees.pp, degrees.dp, copies, rng.choice((None, "separate", "grouped")))
        try:
            nxtrain_to_nxd(folder / "checkpoint", folder / "nxd", target, rates=None)
        except ConfigError as error:
            refused.append(str(error))
            continue
        nxd_to_nxtrain(folder / "nxd", folder / "again", weights_only=True)
        nxtrain_to_hf(folder / "again", folder / "back")
        assert differing(folder / "hf", folder / "back") == [], (run.overrides, target)
        taken += 1
    assert taken >= 10, refused
