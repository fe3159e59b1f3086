"""Fine-tuning by commands: instruction data, adapters, PEFT's files both ways, merged weights, exact resume."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import warnings
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nxtrain.backends import nf4, open_backend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.convert.verify_export import open_model
from nxtrain.common import hf_files
from nxtrain.common.run_folder import ADAPTER_DIR, CHECKPOINTS_DIR, METRICS_FILE
from nxtrain.data.tokenization import train_bpe
from nxtrain.tools.eval.generate import Sampling
from nxtrain.tools.eval.trained import Trained
from tests.support import ROOT
from tests.support.commands import in_process, output_of
from tests.support.generated_docs import blocks
from tests.support.models import continued, hf_model, plan

VOCAB = 300
STEPS = 8
LORA = ("finetune.method=lora", "finetune.r=4", "finetune.alpha=8")
QLORA = ("finetune.method=qlora", *LORA[1:])


class Folder:
    """A base model, a corpus of prompts and answers, and the runs on them."""

    def __init__(self, path: Path, **sizes: int) -> None:
        self.path, self.base = path, path / "base"
        config = {"vocab_size": VOCAB, **sizes}
        hf_model(plan("gqa2", model={"config": config}), std=0.2).save_pretrained(path / "base")
        lines = [{"prompt": f"{a} plus {b} is ", "text": str(a + b)} for a in range(12) for b in range(12)]
        train_bpe([f"{x['prompt']}{x['text']}" for x in lines], VOCAB, path / "base" / hf_files.TOKENIZER)
        (path / "sums.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        printed = in_process(
            "data", "prepare", path / "sums.jsonl", "--prompt", "prompt", "--tokenizer", path / "base",
            "--out", path / "sums.arrow",
        )  # fmt: skip
        assert printed[0] == 0, printed
        (path / "run.toml").write_text("", encoding="utf-8")

    def beside(self, path: Path) -> Folder:
        """The same base and corpus, with runs in another folder."""
        other = copy(self)
        other.path = path
        return other

    def train(self, name: str, *overrides: str, code: int = 0) -> str:
        """`nxtrain train` in this process; returns its standard error in one line."""
        given = (
            f"run.dir={self.path / name}", f"model.hf={self.base}", "model.init=hf", "backend.name=cpu",
            "data.source=arrow", f"data.path={self.base.parent / 'sums.arrow'}", "data.packing=best_fit",
            "data.doc_mask=true", "data.workers=0", f"train.steps={STEPS}", "train.seq_len=32", "train.global_batch=4",
            "train.micro_batch=2",
            "optim.lr=1e-2", "optim.min_lr=1e-2", "checkpoint.every=4", "metrics.log_every=1",
            "metrics.tensorboard=false", "metrics.progress=false",
        )  # fmt: skip
        result = in_process("train", self.base.parent / "run.toml", *given, *overrides)
        assert result[0] == code, result
        return " ".join(result[2].split())

    def losses(self, name: str) -> list[float]:
        lines = (self.path / name / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def adapter(self, name: str) -> dict[str, Tensor]:
        return load_file(self.path / name / ADAPTER_DIR / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = Folder(tmp_path_factory.mktemp("finetuning"))
    made.train("lora", *LORA)
    return made


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The same with a base whose columns 64 divides, which bitsandbytes needs on CPUs."""
    return Folder(tmp_path_factory.mktemp("wide"), intermediate_size=128)


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))


def peft_logits(
    base: Path, adapter: Path, *, merged: bool = False, quantized: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    from peft import PeftModel

    model = loaded_in_nf4(base) if quantized else loaded(base)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        result = PeftModel.from_pretrained(model, str(adapter))
    for module in result.modules():  # in evaluation, bitsandbytes computes in bf16 on some CPUs, of some shapes
        module.training = type(module).__module__.startswith("bitsandbytes")
    with torch.no_grad():
        whole = cast(Any, result).merge_and_unload() if merged else result if quantized else result.to(dtype)
        return cast(Tensor, whole(input_ids=tokens()).logits)


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def loaded_in_nf4(folder: Path) -> Any:
    """The model of transformers and bitsandbytes, which compute products in float32."""
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return loaded(folder, quantization_config=how)


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.no_grad():
        return cast(Tensor, loaded(folder).to(dtype)(input_ids=tokens()).logits)


def our_logits(checkpoint: Path) -> Tensor:
    with torch.no_grad():
        return open_model(checkpoint, open_backend("cpu"), 64).logits(tokens())


def newest(run: Path) -> Path:
    return directory.step_path(run / CHECKPOINTS_DIR, STEPS)


def assert_rounded(actual: Tensor, expected: Tensor) -> None:
    """Hold logits in float32 against others.

    Either computation is up to 2.2e-6 of the largest logit from the same weights in float64, with NF4 and without. For
    logits of 7, that is 1.4e-5.
    """
    torch.testing.assert_close(actual, expected, rtol=0, atol=4e-6 * float(expected.abs().max()))


def assert_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_the_run_begins_as_the_base_and_learns(folder: Folder) -> None:
    """B is zero at first, so that the first loss is that of full fine-tuning, bit for bit."""
    said = folder.train("full", "train.steps=1")
    assert f"starts from the weights of model.hf={folder.base}" in said
    losses = folder.losses("lora")
    assert not (folder.path / "full" / ADAPTER_DIR).exists()
    assert losses[0] == folder.losses("full")[0]
    assert losses[-1] < losses[0] - 0.5


def test_a_start_counts_what_is_trained_and_says_that_nothing_is_left(folder: Folder) -> None:
    said = folder.train("lora", *LORA)
    number = sum(matrix.numel() for matrix in folder.adapter("lora").values())
    assert f"parameters, frozen, below lora adapters of {number:,}; data" in said
    assert f"step {STEPS} is trained already, and train.steps={STEPS}: no step is left" in said
    assert "below" not in folder.train("full", "train.steps=2")


def test_peft_loads_the_adapter_and_computes_what_we_compute(folder: Folder) -> None:
    run = folder.path / "lora"
    ours, base = our_logits(newest(run)), logits(folder.path / "base")
    theirs = peft_logits(folder.path / "base", run / ADAPTER_DIR)
    assert (ours - base).abs().max() > 0.1, "the adapter changes the model"
    assert_rounded(theirs, ours)
    config = json.loads((run / ADAPTER_DIR / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder.path / "base")
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)


def test_merged_weights_are_those_of_peft(folder: Folder, tmp_path: Path) -> None:
    run, base = folder.path / "lora", folder.path / "base"
    assert in_process("convert", "nxtrain-to-hf", run, tmp_path / "merged", "--verify")[0] == 0
    assert in_process("convert", "peft-to-hf", run / ADAPTER_DIR, tmp_path / "again", "--base", base)[0] == 0
    ours = {name: load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again")}
    assert_equal(ours["merged"], ours["again"])
    # In float64, so that the weights are compared, and not the rounding of two different products.
    merged = logits(tmp_path / "merged", torch.float64)
    unmerged = peft_logits(base, run / ADAPTER_DIR, dtype=torch.float64)
    torch.testing.assert_close(merged, unmerged, rtol=0, atol=1e-5)
    before = load_file(base / "model.safetensors")
    moved = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name in before
        if not torch.equal(before[name], ours["merged"][name])
    }
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (tmp_path / "merged" / hf_files.TOKENIZER).is_file()


def test_a_tuned_model_is_asked_as_its_base_was(tmp_path: Path) -> None:
    """Each form of a fully tuned model keeps the base's chat template, special tokens and generation settings."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    folder = Folder(tmp_path)
    given = PreTrainedTokenizerFast(
        tokenizer_file=str(folder.base / hf_files.TOKENIZER),
        eos_token="<|endoftext|>",
        pad_token="!",
        chat_template="{% for turn in messages %}[{{ turn['role'] }}]{{ turn['content'] }}{{ eos_token }}{% endfor %}",
    )
    made = (folder.base / hf_files.TOKENIZER).read_bytes()
    given.save_pretrained(folder.base)
    (folder.base / hf_files.TOKENIZER).write_bytes(made)  # the file of which the corpus knows the fingerprint
    GenerationConfig(eos_token_id=[0, 7], pad_token_id=5, temperature=0.6, do_sample=True).save_pretrained(folder.base)
    mirror = f"checkpoint.mirror={tmp_path / 'mirror'}"
    folder.train("tuned", mirror, "train.steps=2", "checkpoint.every=1")
    talk = [{"role": "user", "content": "1 plus 2 is"}, {"role": "assistant", "content": "3"}]
    asked = AutoTokenizer.from_pretrained(folder.base).apply_chat_template(talk, tokenize=False)
    settings = GenerationConfig.from_pretrained(folder.base).to_dict()
    for file in folder.base.iterdir():
        if file.name != "config.json":
            file.unlink()
    resumed = f"checkpoint.resume={tmp_path / 'mirror'}"
    folder.train("resumed", resumed, "train.steps=3")
    assert in_process("convert", "average", tmp_path / "tuned", tmp_path / "mean")[0] == 0
    for name in ("tuned", "mirror", "resumed", "mean"):
        exported = tmp_path / f"{name}-hf"
        assert in_process("convert", "nxtrain-to-hf", tmp_path / name, exported)[0] == 0, name
        tokenizer = AutoTokenizer.from_pretrained(exported)
        assert tokenizer.apply_chat_template(talk, tokenize=False) == asked, name
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "!"), name
        assert GenerationConfig.from_pretrained(exported).to_dict() == settings, name
        assert AutoConfig.from_pretrained(exported).eos_token_id == [0, 7], name
        assert Trained.find(str(tmp_path / name)).ends == Trained.find(str(exported)).ends == {0, 7}, name


def test_an_adapter_of_peft_is_the_beginning_of_a_run(folder: Folder, tmp_path: Path) -> None:
    """PEFT saves an adapter with values of its own; the run begins with the loss of PEFT's model."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        config = LoraConfig(
            r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False, use_rslora=True
        )
        model = get_peft_model(loaded(folder.path / "base"), config)
    model.save_pretrained(tmp_path / "theirs")
    lora = ("finetune.method=lora", "finetune.r=3", "finetune.alpha=6", 'finetune.targets=["down_proj", "q_proj"]')
    given = f"finetune.adapter={tmp_path / 'theirs'}"
    assert "finetune.rslora=true" in folder.train("refused", *lora, given, code=2)
    assert "does not fit" in folder.train("refused", *lora[:3], "finetune.rslora=true", given, code=2)
    folder.train("begun", *lora, given, "finetune.rslora=true", "train.steps=1", "optim.lr=0", "optim.min_lr=0")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert_equal(theirs, folder.adapter("begun"))
    assert (
        in_process("convert", "peft-to-hf", tmp_path / "theirs", tmp_path / "hf", "--base", folder.path / "base")[0]
        == 0
    )
    expected = peft_logits(folder.path / "base", tmp_path / "theirs", merged=True)
    torch.testing.assert_close(logits(tmp_path / "hf"), expected, rtol=0, atol=1e-5)
    assert_rounded(our_logits(directory.step_path(folder.path / "begun" / CHECKPOINTS_DIR, 1)), expected)


def test_a_quantized_base_is_that_of_peft(wide: Folder, tmp_path: Path) -> None:
    """The exported weights are the restored base with the adapter, and so are those of PEFT."""
    wide.train("qlora", *QLORA)
    wide.train("lora", *LORA, "train.steps=1")
    run, base = wide.path / "qlora", wide.base
    losses = wide.losses("qlora")
    assert 1e-4 < abs(losses[0] - wide.losses("lora")[0]) < 0.5 and losses[-1] < losses[0] - 0.5
    theirs = peft_logits(base, run / ADAPTER_DIR, quantized=True)
    assert (theirs - peft_logits(base, run / ADAPTER_DIR)).abs().max() > 0.05, "NF4 changes the model"
    assert_rounded(our_logits(newest(run)), theirs)
    assert in_process("convert", "nxtrain-to-hf", run, tmp_path / "merged", "--verify")[0] == 0
    assert_rounded(logits(tmp_path / "merged"), theirs)
    said = wide.train("qlora", *LORA, code=4)
    assert "finetune.method is 'qlora' there and" in said


def test_an_adapter_of_peft_is_the_beginning_of_a_run_above_a_quantized_base(wide: Folder, tmp_path: Path) -> None:
    """The first loss is that of PEFT's model above the same base, and training lowers it."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        get_peft_model(loaded(wide.base), config).save_pretrained(tmp_path / "theirs")
    begun = (*QLORA, 'finetune.targets=["q_proj", "down_proj"]', f"finetune.adapter={tmp_path / 'theirs'}")
    wide.train("still", *begun, "train.steps=1", "optim.lr=0", "optim.min_lr=0")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert_equal(theirs, wide.adapter("still"))
    expected = peft_logits(wide.base, tmp_path / "theirs", quantized=True)
    checkpoint = directory.step_path(wide.path / "still" / CHECKPOINTS_DIR, 1)
    assert_rounded(our_logits(checkpoint), expected)
    wide.train("trained", *begun)
    losses = wide.losses("trained")
    assert losses[0] == wide.losses("still")[0] > losses[-1] + 0.5


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_stopped_run_goes_on_bit_for_bit(folder: Folder, wide: Folder, tmp_path: Path, method: str) -> None:
    folder = (wide if method == "qlora" else folder).beside(tmp_path)
    lora = (*LORA, f"finetune.method={method}", "finetune.dropout=0.2", "train.remat=full", "optim.decay_steps=8")
    folder.train("whole", *lora)
    folder.train("parts", *lora, "train.steps=4")
    folder.train("parts", *lora)
    assert folder.losses("parts") == folder.losses("whole")
    assert_equal(folder.adapter("parts"), folder.adapter("whole"))
    written = sum(file.stat().st_size for file in newest(folder.path / "whole").iterdir())
    assert written < 0.6 * (folder.base / "model.safetensors").stat().st_size
    for step, name in ((STEPS, "last"), (4, "early")):
        location = directory.step_path(folder.path / "whole" / CHECKPOINTS_DIR, step)
        code, printed, _ = in_process("convert", "nxtrain-to-peft", location, tmp_path / name)
        assert (code, printed) == (0, f"{tmp_path / name} holds the adapter of {location}, in PEFT's format\n")
    assert_equal(load_file(tmp_path / "last" / "adapter_model.safetensors"), folder.adapter("whole"))
    if method == "qlora":
        early = our_logits(directory.step_path(folder.path / "whole" / CHECKPOINTS_DIR, 4))
        theirs = peft_logits(folder.base, tmp_path / "early", quantized=True)
        assert_rounded(theirs, early)


def test_the_recipe_of_a_small_model_lowers_its_loss(folder: Folder) -> None:
    """On the documentation of this repository, from a base of another vocabulary."""
    recipe, run = ROOT / "configs" / "lora_tiny_cpu.toml", folder.path / "recipe"
    given = (f"run.dir={run}", f"model.hf={folder.base}", f"data.path={ROOT / 'docs'}", "metrics.log_every=1")
    output_of("train", recipe, *given, "metrics.tensorboard=false", "metrics.progress=false")
    losses = folder.losses("recipe")
    assert len(losses) == 20 and sum(losses[-5:]) < sum(losses[:5]) - 5
    assert (run / ADAPTER_DIR / "adapter_model.safetensors").is_file()


def test_quantized_weights_without_their_library(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    nf4._library.cache_clear()
    try:
        assert "pip install 'nxtrain[qlora]'" in folder.train("absent", *QLORA, code=5)
    finally:
        nf4._library.cache_clear()


def test_another_base_or_another_shape_is_refused(folder: Folder, tmp_path: Path) -> None:
    said = folder.train("lora", "finetune.method=lora", "finetune.r=5", "finetune.alpha=8", code=4)
    assert "finetune.r is 4 there and 5 here" in said
    other = tmp_path / "other"
    shutil.copytree(folder.path / "base", other)
    hf_model(plan("gqa2", model={"config": {"vocab_size": VOCAB}}), std=0.2, seed=1).save_pretrained(other)
    said = folder.train("lora", *LORA, f"model.hf={other}", "train.steps=9", code=4)
    assert "the fingerprint of model.hf is" in said
    code, _, err = in_process("convert", "nxtrain-to-hf", folder.path / "lora", tmp_path / "hf", "--base", other)
    assert code == 4 and "an adapter of other base weights" in " ".join(err.split())
    adapter = folder.path / "lora" / ADAPTER_DIR
    said = folder.train("again", *LORA, f"model.hf={other}", f"finetune.adapter={adapter}", code=2)
    assert "trained on other base weights" in said
    code, _, err = in_process("convert", "peft-to-hf", adapter, tmp_path / "hf", "--base", tmp_path / "none")
    assert code == 2 and f"--base {tmp_path / 'none'} is not a folder" in " ".join(err.split())
    code, _, err = in_process("convert", "peft-to-hf", adapter, tmp_path / "hf", "--base", other)
    assert code == 2 and "trained on other base weights" in " ".join(err.split())
    folder.train("again", *LORA, f"finetune.adapter={adapter}", "train.steps=1")
    folder.train("every_weight", "train.steps=1")
    assert "finetune is {}" in folder.train("every_weight", *LORA, code=4)
    assert "no linear layer of the model" in folder.train("none", *LORA, 'finetune.targets=["query"]', code=2)
    assert "did you mean q_proj?" in folder.train("none", *LORA, 'finetune.targets=["q_prj"]', code=2)
    said = folder.train("none", "finetune.method=lora", "finetune.r=1000", code=2)
    assert "finetune.r" in said and "1,000 is larger than every adapted layer" in said
    code, _, err = in_process("convert", "nxtrain-to-nxd", folder.path / "lora", tmp_path / "nxd")
    assert code == 2 and "holds an adapter" in " ".join(err.split())


def test_the_first_commands_of_the_page_run_as_they_stand(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small base and few steps, with its own file as the run."""
    page = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8")
    (run,) = (block for language, block in blocks(page) if language == "toml")
    first = next(block for language, block in blocks(page) if not language)
    small = ["train.steps=2", "train.seq_len=32", "train.global_batch=2", "train.micro_batch=1", "backend.name=cpu"]
    small += ["optim.warmup_steps=1", "data.workers=0", "metrics.progress=false", "metrics.tensorboard=false"]
    shutil.copytree(folder.path / "base", tmp_path / "Llama-3.2-1B")
    shutil.copyfile(folder.path / "sums.jsonl", tmp_path / "chat.jsonl")
    (tmp_path / "chat.toml").write_text(run, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line)[1:] for line in first.splitlines()]
    assert [words[0] for words in commands] == ["data", "train", "generate", "convert"]
    for words in commands:
        output_of(*words, *(small if words[0] == "train" else ()))
    assert (tmp_path / "runs/chat/adapter/adapter_config.json").is_file()
    assert loaded(tmp_path / "chat-hf").config.vocab_size == VOCAB


def test_generate_reads_the_base_with_the_adapter(folder: Folder, tmp_path: Path) -> None:
    run = folder.path / "lora"
    assert in_process("convert", "nxtrain-to-hf", run, tmp_path / "merged")[0] == 0
    one, other = (
        continued(location, "3 plus 4 is ", 6, Sampling(temperature=0.0)) for location in (run, tmp_path / "merged")
    )
    assert one == other
