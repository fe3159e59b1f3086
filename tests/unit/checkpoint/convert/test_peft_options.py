"""Options of PEFT's adapters: each gives the logits of PEFT, or is refused."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from safetensors.torch import save_file
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint.convert.hf import write_merged
from nxtrain.checkpoint.convert.hf_folder import HfFolder
from nxtrain.checkpoint.convert.peft import Adapter, merged_adapter, read_adapter, write_adapter
from nxtrain.checkpoint.convert.verify_export import open_hf_model
from nxtrain.common.errors import ConfigError
from nxtrain.config.finetune_schema import FinetuneConfig

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
R = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "rslora": {"use_rslora": True},
    "layers": {"layers_to_transform": [1]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "no zeros": {"init_lora_weights": False},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter": {"init_lora_weights": "pissa_niter_4"},
    "olora": {"init_lora_weights": "olora"},
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 2}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [1, 2]},
    "alora": {"alora_invocation_tokens": [5, 6]},
    "velora": {"velora_config": VeloraConfig()},
    "kasa": {"kasa_config": KasaConfig()},
    "monteclora": {"monteclora_config": MontecloraConfig()},
    "block diagonal": {"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj", "v_proj"], nblocks=2)},
}
READ = ["none", "rslora", "layers", "gaussian", "no zeros", "orthogonal", "mica"]
"""Options of adapters that are read; others change the base, or add a computation that is none of ours."""


def base_folder(family: str, folder: Path, **sizes: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **sizes})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokens() -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_gives_the_logits_of_peft_or_is_refused(option: str, tmp_path: Path) -> None:
    base, adapter = base_folder("llama", tmp_path / "base"), tmp_path / "adapter"
    config = peft.LoraConfig(
        r=R, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **OPTIONS[option]
    )
    model = peft.get_peft_model(loaded(base), config)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(adapter)
    try:
        write_merged(merged_adapter(adapter, base), tmp_path / "merged")
    except ConfigError:
        assert option not in READ
        return
    assert option in READ
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(loaded(base), adapter).eval()(input_ids=tokens()).logits
        ours = open_hf_model(tmp_path / "merged", CpuBackend(), 20).logits(tokens())
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("value", ["loftq", "lora_ga", "corda", "eva"])
def test_initial_values_from_the_base_are_refused_with_the_way_out(value: str, tmp_path: Path) -> None:
    content = {"peft_type": "LORA", "r": R, "lora_alpha": 8, "init_lora_weights": value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"init_lora_weights='{value}' .* path_initial_model_for_weight_conversion"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("value", [True, "special", ["a"], {"a": 1}], ids=repr)
def test_an_option_of_a_later_peft_is_refused_by_its_name(value: object, tmp_path: Path) -> None:
    content = {"peft_type": "LORA", "r": R, "lora_alpha": 8, "use_new_rule": value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"use_new_rule=.* is not supported, and may change the output"):
        read_adapter(tmp_path)


def test_an_adapter_of_an_earlier_end_survives_a_full_disk(tmp_path: Path) -> None:
    """The error is one of the system, and no defect; other users may read the files."""
    shape = FinetuneConfig(method="lora", r=R, alpha=8.0, targets=("q_proj",))
    layer = "model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A": torch.zeros(R, 32), f"{layer}.lora_B": torch.zeros(32, R)}
    write_adapter(tmp_path, Adapter(shape, tensors))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
        with pytest.raises(OSError, match="File too large"):
            write_adapter(tmp_path, Adapter(shape, {name: x + 1 for name, x in tensors.items()}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    kept = read_adapter(tmp_path)
    assert all(torch.equal(kept.tensors[name], tensor) for name, tensor in tensors.items())
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~_umask()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("family", "module", "matrices"),
    [
        ("mixtral", "block_sparse_moe", {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}),
        ("qwen3_moe", "mlp", {"gate_proj": (16, 32), "up_proj": (16, 32), "down_proj": (32, 16)}),
    ],
)
def test_adapters_of_single_experts_are_merged(
    family: str, module: str, matrices: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    """PEFT with transformers 4 adapts each expert's matrix as a layer with a pair of its own."""
    base, adapter = base_folder(family, tmp_path / "base", **EXPERTS), tmp_path / "adapter"
    adapter.mkdir()
    updates: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for expert in (0, 3):
        for matrix, (rows, columns) in matrices.items():
            name = f"model.layers.1.{module}.experts.{expert}.{matrix}"
            a, b = torch.randn(R, columns), torch.randn(rows, R)
            tensors |= {
                f"base_model.model.{name}.lora_A.weight": a,
                f"base_model.model.{name}.lora_B.weight": b,
            }
            updates[f"{name}.weight"] = 2.0 * b @ a
    save_file(tensors, adapter / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": R, "lora_alpha": 2 * R, "target_modules": sorted(matrices)}
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    plain, merged = HfFolder(base), merged_adapter(adapter, base)
    for name in plain.shapes:
        expected = plain.read(name)
        if name in updates:
            expected = expected + updates[name]
        torch.testing.assert_close(merged.read(name), expected)
