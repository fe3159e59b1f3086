"""Adapters of experts by commands: PEFT's files both ways, merged weights, exact resume, what is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.convert.verify_export import open_model
from nxtrain.common.run_folder import ADAPTER_DIR, CHECKPOINTS_DIR, METRICS_FILE
from tests.support.commands import in_process
from tests.support.models import hf_model, plan

VOCAB, STEPS, SEQ = 64, 4, 16
BOTH = '["q_proj", "experts.gate_up_proj", "experts.down_proj"]'
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}


@pytest.fixture(scope="module", params=sorted(SIZES))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base and its data."""
    folder = tmp_path_factory.mktemp(request.param)
    config = {"vocab_size": VOCAB, "hidden_size": 32, **SIZES[request.param]}
    hf_model(plan("gqa2", model={"family": request.param, "config": config}), std=0.2).save_pretrained(folder / "base")
    write_rows(folder)
    return folder / "base"


def write_rows(folder: Path) -> None:
    rows = np.random.default_rng(1).integers(0, VOCAB, (8, SEQ + 1))
    np.save(folder / "rows.npy", np.sort(rows).astype(np.uint16))
    (folder / "run.toml").write_text("", encoding="utf-8")


def train(base: Path, run: Path, *overrides: str, code: int = 0) -> str:
    given = (
        f"run.dir={run}", f"model.hf={base}", "model.init=hf", "backend.name=cpu", "data.source=tokens",
        f"data.path={base.parent / 'rows.npy'}", f"train.steps={STEPS}", f"train.seq_len={SEQ}", "train.global_batch=4",
        "train.micro_batch=2", "optim.lr=1e-2", "optim.min_lr=1e-2", "optim.decay_steps=4", "checkpoint.every=2",
        "metrics.log_every=1", "metrics.tensorboard=false", "metrics.progress=false",
        "finetune.method=lora", "finetune.r=3", "finetune.alpha=6",
    )  # fmt: skip
    found = in_process("train", base.parent / "run.toml", *given, *overrides)
    assert found[0] == code, found
    return " ".join(found[2].split())


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()]


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(3))


def our_logits(run: Path, step: int) -> Tensor:
    with torch.no_grad():
        model = open_model(directory.step_path(run / CHECKPOINTS_DIR, step), open_backend("cpu"), SEQ)
        return model.logits(tokens())


def hf_logits(base: Path, adapter: Path | None = None) -> Tensor:
    """Logits of transformers' model, and of PEFT's model above it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(adapter))
        logits: Tensor = model(input_ids=tokens()).logits
    return logits


@pytest.mark.parametrize("targets", [BOTH, '["experts.gate_up_proj"]', '["experts.down_proj"]'])
def test_peft_loads_adapters_of_experts_and_computes_what_we_compute(base: Path, tmp_path: Path, targets: str) -> None:
    run = tmp_path / "run"
    train(base, run, f"finetune.targets={targets}")
    theirs = hf_logits(base, run / ADAPTER_DIR)
    assert (theirs - hf_logits(base)).abs().max() > 0.05, "the adapter changes the model"
    torch.testing.assert_close(our_logits(run, STEPS), theirs, rtol=0, atol=1e-5)
    assert in_process("convert", "nxtrain-to-hf", run, tmp_path / "merged", "--verify")[0] == 0
    torch.testing.assert_close(hf_logits(tmp_path / "merged"), theirs, rtol=0, atol=1e-5)


def test_an_adapter_of_experts_that_peft_wrote_is_the_beginning_of_a_run(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    model.save_pretrained(tmp_path / "theirs")
    given = (f"finetune.targets={BOTH}", f"finetune.adapter={tmp_path / 'theirs'}", "train.steps=1")
    train(base, tmp_path / "begun", *given, "optim.lr=0", "optim.min_lr=0")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "begun" / ADAPTER_DIR / "adapter_model.safetensors")
    assert theirs.keys() == ours.keys()
    assert [name for name in theirs if not torch.equal(theirs[name], ours[name])] == []
    expected = hf_logits(base, tmp_path / "theirs")
    torch.testing.assert_close(our_logits(tmp_path / "begun", 1), expected, rtol=0, atol=1e-5)
    code, _, _ = in_process("convert", "peft-to-hf", tmp_path / "theirs", tmp_path / "hf", "--base", base)
    assert code == 0
    torch.testing.assert_close(hf_logits(tmp_path / "hf"), expected, rtol=0, atol=1e-5)


def test_a_stopped_run_of_adapters_of_experts_goes_on_bit_for_bit(base: Path, tmp_path: Path) -> None:
    train(base, tmp_path / "whole", f"finetune.targets={BOTH}")
    train(base, tmp_path / "parts", f"finetune.targets={BOTH}", "train.steps=2")
    train(base, tmp_path / "parts", f"finetune.targets={BOTH}")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]


def test_what_adapters_of_experts_exclude_is_refused(base: Path, tmp_path: Path) -> None:
    said = train(base, tmp_path / "run", f"finetune.targets={BOTH}", "finetune.dropout=0.1", code=2)
    assert "finetune.dropout" in said and "which has no dropout" in said
    assert "experts.down_proj" in train(base, tmp_path / "run", 'finetune.targets=["experts.down"]', code=2)
    train(base, tmp_path / "run", f"finetune.targets={BOTH}", "train.steps=1")
    shutil.copytree(tmp_path / "run" / ADAPTER_DIR, tmp_path / "other")
    file = tmp_path / "other" / "adapter_config.json"
    content = json.loads(file.read_text()) | {"target_parameters": ["mlp.gate.weight"]}
    file.write_text(json.dumps(content), encoding="utf-8")
    code, _, said = in_process("convert", "peft-to-hf", tmp_path / "other", tmp_path / "hf", "--base", base)
    assert code == 2 and "target_parameters has 'mlp.gate.weight'" in " ".join(said.split())


@pytest.mark.parametrize(("family", "targets"), [*((family, BOTH) for family in SIZES), ("gpt_oss", '["q_proj"]')])
def test_quantized_runs_export_experts_and_routers_as_they_are(family: str, targets: str, tmp_path: Path) -> None:
    """Only linear layers are in NF4, during the run and in its export."""
    base = tmp_path / "base"
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "head_dim": 64, **SIZES.get(family, SIZES["mixtral"])}
    hf_model(plan("gqa2", model={"family": family, "config": sizes}), std=0.2).save_pretrained(base)
    write_rows(tmp_path)
    train(base, tmp_path / "run", f"finetune.targets={targets}", "finetune.method=qlora")
    assert in_process("convert", "nxtrain-to-hf", tmp_path / "run", tmp_path / "merged", "--verify")[0] == 0
    torch.testing.assert_close(hf_logits(tmp_path / "merged"), our_logits(tmp_path / "run", STEPS), rtol=0, atol=2e-5)
    merged, before = load_file(tmp_path / "merged" / "model.safetensors"), load_file(base / "model.safetensors")
    routers = [name for name in merged if name.endswith((".gate.weight", ".router.weight"))]
    assert routers and all(torch.equal(merged[name], before[name]) for name in routers if name in before)
