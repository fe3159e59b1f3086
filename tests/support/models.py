"""Small models, ours and transformers', with the same weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.common import hf_files
from nxtrain.common.dimensions import Dimensions
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import ParamTable
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.data.tokenization import train_bpe
from nxtrain.nn.quantized import filling
from nxtrain.train.build import build_meta, fill_model

if TYPE_CHECKING:
    import transformers

    from nxtrain.tools.eval.generate import Sampling
from typing import TypeVar, cast

from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import ShardSpec
from nxtrain.nn.init import materialize
from nxtrain.parallel.regions import TensorParallel

SCALING_TYPES = ("linear", "dynamic", "yarn", "llama3")
MIXTURES = ("mixtral", "qwen3_moe")
"""Families with experts, which are drawn where a test asks for them."""
WITH_EXPERTS = (*MIXTURES, "gpt_oss")


def draw_scaling(rope_type: str, rng: Random, seq_len: int) -> dict[str, Any]:
    """Keys `rope_scaling` and `max_position_embeddings` of a model that sees `seq_len` tokens beyond its original."""
    original = rng.randint(max(1, seq_len // 4), max(1, seq_len - 1))
    factor = seq_len / original * rng.uniform(1.01, 4.0)
    scaling: dict[str, Any] = {"rope_type": rope_type, "factor": factor}
    if rope_type in ("linear", "dynamic"):
        return {"rope_scaling": scaling, "max_position_embeddings": original}
    scaling["original_max_position_embeddings"] = original
    if rope_type == "llama3":
        low = rng.uniform(0.5, 2.0)
        scaling |= {"low_freq_factor": low, "high_freq_factor": low * rng.uniform(1.5, 8.0)}
        return {"rope_scaling": scaling, "max_position_embeddings": int(original * factor)}
    optional = {
        # Its square multiplies the scores: by 3, half an ulp of the weights moves a norm of float64 by 1e-5.
        "attention_factor": rng.uniform(0.7, 1.3),
        "beta_fast": rng.uniform(5.0, 64.0),
        "beta_slow": rng.uniform(0.2, 4.0),
        "mscale": rng.uniform(0.3, 2.0),
        "mscale_all_dim": rng.uniform(0.3, 2.0),
        "truncate": False,
    }
    scaling |= {name: value for name, value in optional.items() if rng.random() < 0.4}
    return {"rope_scaling": scaling, "max_position_embeddings": rng.choice((original, int(original * factor)))}


def draw_experts(family: str, rng: Random, given: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides for experts of any number and width, with losses of the routers.

    A capacity is drawn so large that no token is left out: transformers has none.
    """
    ep = given.get("parallel.ep", 1)
    number = -(-rng.choice((1, 2, 3, rng.randint(4, 9))) // ep) * ep
    shape: dict[str, Any] = {
        "num_experts_per_tok": rng.randint(1, number),
        "router_aux_loss_coef": rng.choice((0.0, 0.02, 0.5)),
    }
    if family in ("mixtral", "gpt_oss"):
        shape |= {"num_local_experts": number, "intermediate_size": rng.randint(1, 60)}
        if family == "gpt_oss":
            shape |= {"swiglu_limit": rng.choice((0.3, 7.0)), "swiglu_alpha": rng.choice((1.0, 1.702))}
    else:
        layers = range(given["model.config.num_hidden_layers"])
        shape |= {
            "num_experts": number,
            "moe_intermediate_size": rng.randint(1, 60),
            "norm_topk_prob": rng.random() < 0.5,
            "decoder_sparse_step": rng.choice((1, 1, 2)),
            "mlp_only_layers": [layer for layer in layers if rng.random() < 0.2],
        }
    result: dict[str, Any] = {f"model.config.{key}": value for key, value in shape.items()}
    result["model.moe_z_loss"] = rng.choice((0.0, 0.001, 0.1))
    if rng.random() < 0.3:
        result |= {"model.moe_dispatch": "capacity", "model.moe_capacity_factor": float(number)}
    return result


Layer = TypeVar("Layer", bound=nn.Module)

ALONE = Axis("tp", 0, ((0,),))
"""The axis of a rank that shares nothing."""


def alone(dtype: torch.dtype = torch.float32, kernels: Kernels | None = None) -> TensorParallel:
    """Tensor parallel context of layers that are not sharded."""
    return TensorParallel(ALONE, C10dCollectives(1), kernels or FusedKernels(), dtype)


def filled(
    layer: Layer, axis: Axis, weights: Mapping[str, Tensor], biases: Mapping[str, Tensor] | None = None
) -> Layer:
    """Give a layer on the meta device its weight, cut out of whole tensors by segment name (empty if only one)."""
    specs = cast(Mapping[str, ShardSpec], layer.specs)

    def fill(name: str, local: Tensor) -> None:
        local.copy_(specs[name].shard((biases or {}) if name == "bias" else weights, axis))

    materialize(layer, lambda host: host, fill)
    return layer


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers, the same in every process."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


SHAPES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 8},
    "gqa": {"num_key_value_heads": 4},
    "gqa2": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "odd": {"num_key_value_heads": 4, "vocab_size": 131, "intermediate_size": 89},
    "llama3-rope": {
        "num_key_value_heads": 4,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "yarn-rope": {
        "num_key_value_heads": 4,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "linear-rope": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "dynamic-rope": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
}
"""Attention and vocabulary variants, all otherwise `BASE`."""

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


def plan(shape: str, **sections: Mapping[str, Any]) -> Resolved:
    """A resolved configuration for one of `SHAPES`, a Llama by default; `sections` override its tables."""
    tables = {name: dict(table) for name, table in sections.items()}
    family = find_family(tables.get("model", {}).get("family", "llama"))
    model = family.config_type.model_validate({**BASE, **SHAPES[shape], **tables.get("model", {}).pop("config", {})})
    tables.setdefault("train", {}).setdefault("seq_len", 32)
    tables.setdefault("model", {})["config"] = model.model_dump(exclude_none=True)
    return Resolved(RunConfig.model_validate(tables), family, model)


def changed(resolved: Resolved, **sections: Mapping[str, Any]) -> Resolved:
    """A configuration with other values of some keys."""
    config = resolved.config
    changes = {name: getattr(config, name).model_copy(update=dict(values)) for name, values in sections.items()}
    return replace(resolved, config=config.model_copy(update=changes))


@cache
def _transformers() -> Any:
    """The package with its models, imported late: ranks that get their weights from elsewhere do without.

    accelerate, which the models import, would import torch-xla, in three quarters of the time.
    """
    with patch.dict(os.environ, {"USE_TORCH_XLA": "0"}):
        import transformers.modeling_utils
    return transformers


def hf_model(
    resolved: Resolved,
    seed: int = 0,
    std: float = 0.05,
    weights: Mapping[str, Tensor] | None = None,
    attention: str = "eager",
) -> transformers.PreTrainedModel:
    """transformers' model of the same shape with given weights or random float32 ones, norms included.

    `attention` goes to the constructor, since the release that NeuronX Distributed needs has no later way.
    """
    transformers = _transformers()
    config = transformers.CONFIG_MAPPING[resolved.family.name].from_dict(
        resolved.family.to_hf(resolved.model, "float32")
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        if resolved.dimensions.mixture is not None:
            model.set_experts_implementation("eager")  # the default one has no float64
        with torch.no_grad():
            for name, parameter in hf_tensors(resolved.dimensions, model.named_parameters()).items():
                if weights is not None:
                    parameter.copy_(weights[name])
                    continue
                parameter.copy_(torch.randn(parameter.shape) * std + (1.0 if "norm" in name else 0.0))
    return model


def hf_tensors(dimensions: Dimensions, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of transformers' model by their names in checkpoints, as views.

    transformers 5 stacks the matrices of all experts into one tensor, and renames them, when it loads a checkpoint.
    """
    results: dict[str, Tensor] = {}
    mixture = dimensions.mixture
    for name, tensor in tensors:
        prefix, _, leaf = name.rpartition(".experts.")
        if mixture is None or "lora_" in name:
            results[name] = tensor
        elif prefix:
            prefix = prefix.removesuffix("mlp") + mixture.module
            for expert, matrix in enumerate(tensor):
                if mixture.biases:
                    results |= _of_gpt_oss(f"{prefix}.experts.{expert}", leaf, matrix)
                    continue
                parts = {mixture.down: matrix}
                if leaf == "gate_up_proj":
                    parts = dict(zip((mixture.gate, mixture.up), matrix.chunk(2), strict=True))
                results |= {f"{prefix}.experts.{expert}.{part}.weight": view for part, view in parts.items()}
        else:
            results[name.replace(".mlp.gate.", f".{mixture.module}.gate.")] = tensor
    return results


def _of_gpt_oss(expert: str, leaf: str, matrix: Tensor) -> dict[str, Tensor]:
    """Views of the matrices or biases of an expert of gpt-oss, whose columns are outputs, gate and values by turns."""
    kind = "bias" if leaf.endswith("_bias") else "weight"
    by_output = matrix.t() if kind == "weight" else matrix
    if leaf.startswith("down_proj"):
        return {f"{expert}.down_proj.{kind}": by_output}
    return {f"{expert}.gate_proj.{kind}": by_output[::2], f"{expert}.up_proj.{kind}": by_output[1::2]}


def weights_of(resolved: Resolved, std: float = 0.05) -> dict[str, Tensor]:
    """Whole weights of `hf_model`, by global name, in float32."""
    model = hf_model(resolved, std=std)
    return {name: tensor.detach() for name, tensor in hf_tensors(resolved.dimensions, model.named_parameters()).items()}


def our_model(resolved: Resolved, backend: Backend, mesh: Mesh, weights: Mapping[str, Tensor]) -> nn.Module:
    """Our model, its shards cut from whole tensors under their global names."""
    model = build_meta(resolved, backend, mesh)
    table = ParamTable.of(model)

    def fill(name: str, local: Tensor) -> None:
        spec = table[name]
        whole = {segment.name: weights[spec.global_name(name, segment)] for segment in spec.segments}
        local.copy_(spec.shard(whole, mesh.tp))

    fill_model(resolved, model, backend, mesh, filling(model, weights.__getitem__, fill))
    return model


def tokens(resolved: Resolved, batch: int, seed: int = 0) -> Tensor:
    """(batch, seq_len + 1) random token ids."""
    generator = torch.Generator().manual_seed(seed)
    length = resolved.config.train.seq_len + 1
    return torch.randint(0, resolved.model.vocab_size, (batch, length), generator=generator)


LENGTH = 64
"""Longest sequence of the models."""

TEXT = "na\xefve caf\xe9 \u4f60\u597d, \u4e16\u754c \U0001f642 the quick brown fox "


DRAWN_FAMILIES = ("drawn-llama", "drawn-mistral", "drawn-mixtral", "drawn-qwen2", "drawn-qwen3", "drawn-qwen3_moe")
"""Shapes of `text_model` whose sizes are drawn, one of each family."""


def text_model(folder: Path, shape: str = "gqa2") -> Path:
    """Write a model with 300 entries of vocabulary; a shape of `SHAPES` or `DRAWN_FAMILIES`."""
    config: dict[str, Any] = {"vocab_size": 300}
    family = shape.removeprefix("drawn-")
    drawn = shape in DRAWN_FAMILIES
    if drawn:
        config |= _sizes(Random(shape))
    if family in MIXTURES:
        keys = draw_experts(family, Random(shape), {"model.config.num_hidden_layers": config["num_hidden_layers"]})
        prefix = "model.config."
        config |= {key.removeprefix(prefix): value for key, value in keys.items() if key.startswith(prefix)}
    model = {"family": family if drawn else "llama", "config": config}
    hf_model(plan("gqa2" if drawn else shape, model=model), std=0.3).save_pretrained(folder)
    train_bpe([TEXT * 50], 300, folder / hf_files.TOKENIZER)
    return folder


def _sizes(rng: Random) -> dict[str, Any]:
    heads = rng.choice((2, 3, 4, 6))
    return {
        "hidden_size": heads * rng.randint(8, 20),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": 2 * rng.randint(4, 12),
        "intermediate_size": rng.randint(20, 120),
        "num_hidden_layers": rng.randint(1, 3),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def continued(folder: Path, prompt: str, count: int, sampling: Sampling, seed: int = 0) -> str:
    """A prompt and its continuation by the model of a place."""
    from nxtrain.tools.eval.generate import GenerateRequest, generate

    _, (text,) = generate(str(folder), GenerateRequest((prompt,), count, seed), sampling)
    return text.prompt + text.text
