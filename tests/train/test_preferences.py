"""Preferences by commands: pairs are prepared, adapters and whole models train on them, and a resume is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nxtrain.common import hf_files
from nxtrain.common.run_folder import ADAPTER_DIR, METRICS_FILE
from nxtrain.data.tokenization import train_bpe
from tests.support import ROOT
from tests.support.command_ranks import train_as_launched
from tests.support.commands import context, in_process
from tests.support.models import hf_model, plan

VOCAB, STEPS = 300, 6
PAIRS = ROOT / "configs" / "pairs_tiny.jsonl"


class Folder:
    """A base model, a corpus of pairs, and the runs on them."""

    def __init__(self, path: Path) -> None:
        self.path, self.base, self.corpus = path, path / "base", path / "pairs.arrow"
        hf_model(plan("gqa2", model={"config": {"vocab_size": VOCAB}}), std=0.2).save_pretrained(self.base)
        train_bpe([PAIRS.read_text(encoding="utf-8")] * 3, VOCAB, self.base / hf_files.TOKENIZER)
        printed = in_process("data", "prepare", PAIRS, "--pairs", "--tokenizer", self.base, "--out", self.corpus)
        assert printed[0] == 0, printed
        (path / "run.toml").write_text("", encoding="utf-8")

    def given(self, name: str, *overrides: str) -> list[str]:
        return [
            f"run.dir={self.path / name}", f"model.hf={self.base}", "model.init=hf", "backend.name=cpu",
            "data.source=arrow", f"data.path={self.corpus}", "data.packing=best_fit", "data.doc_mask=true",
            f"train.steps={STEPS}", "train.seq_len=48", "train.global_batch=4", "train.micro_batch=2", "optim.lr=3e-3",
            "optim.min_lr=3e-3", "checkpoint.every=3", "metrics.log_every=1", "metrics.tensorboard=false",
            "metrics.progress=false", "finetune.pairs_per_row=3", "finetune.objective=dpo", *overrides,
        ]  # fmt: skip

    def train(self, name: str, *overrides: str, code: int = 0) -> str:
        """`nxtrain train` in this process; returns its standard error in one line."""
        result = in_process("train", self.path / "run.toml", *self.given(name, *overrides))
        assert result[0] == code, result
        return " ".join(result[2].split())

    def records(self, name: str) -> list[dict[str, Any]]:
        lines = (self.path / name / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, name: str) -> list[float]:
        return [record["loss"] for record in self.records(name)]

    @property
    def references(self) -> list[Path]:
        return sorted(self.path.glob("pairs.arrow.reference-*.npy"))


SFT = ("finetune.objective=sft", "finetune.pairs_per_row=8")
LORA = ("finetune.method=lora", "finetune.r=4", "finetune.alpha=8")
QLORA = ("finetune.method=qlora", "finetune.r=4", "finetune.alpha=8", "precision.type=mixed_precision")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("preferences"))


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_learn_a_preference_and_go_on_from_a_checkpoint_exactly(folder: Folder, method: str) -> None:
    """In float32, and above quantized weights in bf16."""
    adapted, parts = QLORA if method == "qlora" else LORA, f"parts-{method}"
    folder.train(method, *adapted)
    assert folder.losses(method)[0] == pytest.approx(0.693147, abs=1e-6), "a new adapter is the reference itself"
    folder.train(parts, *adapted, "train.steps=3", f"optim.decay_steps={STEPS}")
    folder.train(parts, *adapted)
    assert folder.losses(parts) == folder.losses(method)
    result = [load_file(folder.path / name / ADAPTER_DIR / "adapter_model.safetensors") for name in (method, parts)]
    assert result[0].keys() == result[1].keys()
    assert all((result[0][name] == result[1][name]).all() for name in result[0])
    assert not folder.references
    last = folder.records(method)[-1]
    assert {
        "pairs",
        "targets",
        "reward_chosen",
        "reward_rejected",
        "reward_margin",
        "reward_accuracy",
        "kl",
    } <= last.keys()
    assert last["reward_margin"] > 0 and last["targets"] > last["pairs"] == int(last["pairs"])


def test_every_weight_learns_beside_a_reference_that_is_computed_once(folder: Folder) -> None:
    said = folder.train("full", "train.eval_every=3", "data.validation_fraction=0.2", "train.eval_batches=2")
    (file,) = folder.references
    assert f"is written to {file}" in said
    assert folder.losses("full")[0] == pytest.approx(0.693147, abs=1e-6), "the first weights are the reference itself"
    evaluated = [folder.records("full")[step] for step in (2, 5)]
    assert evaluated[0]["val_loss"] != evaluated[1]["val_loss"] > 0
    for record in evaluated:
        assert record["val_pairs"] == int(record["val_pairs"]) > 0
        right = record["val_reward_accuracy"] * record["val_pairs"]
        assert right == pytest.approx(round(right), abs=1e-4) and 0 <= record["val_reward_accuracy"] <= 1
        chosen, rejected = record["val_reward_chosen"], record["val_reward_rejected"]
        assert record["val_reward_margin"] == pytest.approx(chosen - rejected) != 0
    assert not any("val_reward_margin" in folder.records("full")[step] for step in (0, 1, 3, 4))
    at = file.stat().st_mtime_ns
    split = ("train.eval_every=3", "data.validation_fraction=0.2", "train.eval_batches=2")
    folder.train("again", *split, "train.steps=3", f"optim.decay_steps={STEPS}")
    assert f"the reference is that of {file}" in folder.train("again", *split)
    assert (folder.losses("again"), file.stat().st_mtime_ns) == (folder.losses("full"), at)


def test_ranks_share_the_reference_and_go_on_from_one_rank(folder: Folder) -> None:
    for file in folder.references:
        file.unlink()
    overrides = folder.given("shared", "parallel.dp=2", "train.steps=3", f"optim.decay_steps={STEPS}")
    train_as_launched(context(), folder.path, folder.path / "run.toml", overrides)
    folder.train("shared")
    folder.train("alone")
    assert folder.losses("shared") == pytest.approx(folder.losses("alone"), abs=2e-6)
    (file,) = folder.references
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    assert f"{file} is damaged; delete it" in folder.train("damaged", code=3)
    file.unlink()


def test_orpo_lowers_its_loss_without_a_reference_in_passes_over_the_rows(folder: Folder) -> None:
    given = [line for line in folder.given("orpo", "finetune.objective=orpo") if not line.startswith("train.steps")]
    code, _, said = in_process("train", folder.path / "run.toml", *given, "train.epochs=1")
    losses = folder.losses("orpo")
    assert code == 0 and f"rows: train.steps={len(losses)}" in " ".join(said.split()), said
    assert sum(record["pairs"] for record in folder.records("orpo")) >= 64
    assert losses[-1] < losses[0] - 0.1
    assert not folder.references


@pytest.mark.parametrize("name", ["eval-lora", "eval-full"])
def test_an_evaluation_on_the_pairs_has_the_means_of_the_run(folder: Folder, name: str) -> None:
    """By the checkpoint beside the base, and without a reference."""
    split = ("train.eval_every=6", f"data.validation_path={folder.corpus}", "train.eval_batches=100")
    folder.train(name, *(LORA if name == "eval-lora" else ()), *split)
    record = folder.records(name)[-1]
    given = ("eval", folder.path / name, "--pairs", folder.corpus, "--json")
    code, text, said = in_process(*given, "--reference", folder.base)
    assert code == 0, said
    found = json.loads(text)["tasks"]["preferences"]
    assert (found["n"], found["left_out"]) == (64, 0) and record["val_pairs"] == 64
    assert found["accuracy"] == pytest.approx(record["val_reward_accuracy"], abs=1e-9)
    for key in ("reward_chosen", "reward_rejected"):
        assert found[key] == pytest.approx(record[f"val_{key}"], abs=2e-5), key
    assert found["margin"] == pytest.approx(record["val_reward_margin"], abs=2e-5) != 0
    alone = json.loads(in_process(*given)[1])["tasks"]["preferences"]
    assert 0 <= alone["accuracy_per_token"] <= 1 and alone["margin"] != found["margin"]


@pytest.fixture(scope="module")
def labelled(folder: Folder) -> tuple[str, ...]:
    """Overrides of a run on the answers of the pairs, which are labelled."""
    rows = []
    for line in PAIRS.read_text(encoding="utf-8").splitlines():
        pair = json.loads(line)
        for side in ("chosen", "rejected"):
            rows.append({"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"})
    source, out = folder.path / "labelled.jsonl", folder.path / "labelled.arrow"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    told = in_process("data", "prepare", source, "--labels", "--tokenizer", folder.base, "--out", out)
    assert told[0] == 0, told
    return (f"data.path={out}", "finetune.objective=kto")


def test_adapters_learn_labels_and_go_on_from_a_checkpoint_exactly(folder: Folder, labelled: tuple[str, ...]) -> None:
    said = folder.train("kto", *LORA, *labelled)
    assert "of which 64 are desirable" in said
    assert folder.losses("kto")[0] == pytest.approx(0.5, abs=1e-6), "a new adapter is the reference itself"
    folder.train("kto-parts", *LORA, *labelled, "train.steps=3", f"optim.decay_steps={STEPS}")
    folder.train("kto-parts", *LORA, *labelled)
    assert folder.losses("kto-parts") == folder.losses("kto")
    last = folder.records("kto")[-1]
    assert last["reward_margin"] > 0 and last["kl"] >= 0 and 0 < last["desirable"] < last["answers"]
    assert "pairs" not in last and last["targets"] > last["answers"]


def test_labels_beside_a_stored_reference_are_evaluated(folder: Folder, labelled: tuple[str, ...]) -> None:
    split = ("train.eval_every=3", "data.validation_fraction=0.2", "train.eval_batches=2")
    said = folder.train("kto-full", *labelled, *split)
    files = sorted(folder.path.glob("labelled.arrow.reference-*.npy"))
    assert len(files) == 2 and all(f"is written to {file}" in said for file in files)
    assert folder.losses("kto-full")[0] == pytest.approx(0.5, abs=1e-6), "the first weights are the reference itself"
    record = folder.records("kto-full")[-1]
    assert record["val_answers"] > 0 and record["val_kl"] >= 0 and 0 <= record["val_reward_accuracy"] <= 1
    overrides = folder.given("kto-shared", *labelled, *split, "parallel.dp=2", "train.micro_batch=1")
    train_as_launched(context(), folder.path, folder.path / "run.toml", overrides)
    assert folder.losses("kto-shared") == pytest.approx(folder.losses("kto-full"), abs=2e-6)
    assert sorted(folder.path.glob("labelled.arrow.reference-*.npy")) == files
    assert "holds labelled answers" in folder.train("none", *labelled, *SFT, code=3)
    assert "nxtrain data prepare --labels" in folder.train("none", "finetune.objective=kto", code=3)
    assert "from nxtrain data prepare --labels" in folder.train("none", *labelled, "data.source=text", code=2)


def test_what_pairs_do_not_go_with_is_refused_with_a_way_out(folder: Folder) -> None:
    said = folder.train("none", *SFT, code=3)
    assert "holds pairs, whose rejected answers are not to be learned; set finetune.objective=dpo or orpo" in said
    said = folder.train("none", "data.packing=concat", "precision.params=fp16", "data.mixture=['a', 'b']", code=2)
    assert "set data.packing=best_fit and data.doc_mask=true" in said
    assert "the loss scale of params=fp16 does not support" in said and "data.mixture has several" in said
    assert "set model.hf=FOLDER and model.init=hf" in folder.train("none", "model.init=scaled", code=2)
    assert "every pair is longer than a row" in folder.train("none", "train.seq_len=4", code=3)
    prompts = folder.path / "prompts.arrow"
    lines = folder.path / "prompts.jsonl"
    lines.write_text('{"prompt": "a", "text": "b"}\n', encoding="utf-8")
    printed = in_process("data", "prepare", lines, "--prompt", "prompt", "--tokenizer", folder.base, "--out", prompts)
    assert printed[0] == 0, printed
    assert "prepare them with nxtrain data prepare --pairs" in folder.train("none", f"data.path={prompts}", code=3)


def test_the_recipe_widens_the_margin_also_of_held_out_pairs_and_the_report_shows_it(folder: Folder) -> None:
    run = folder.path / "recipe"
    given = (f"run.dir={run}", f"model.hf={folder.base}", f"data.path={folder.corpus}", "metrics.log_every=1")
    quiet = ("metrics.tensorboard=false", "metrics.progress=false")
    code, _, err = in_process("train", ROOT / "configs" / "dpo_tiny_cpu.toml", *given, *quiet)
    assert code == 0, err
    records = folder.records("recipe")
    margins = [record["reward_margin"] for record in records]
    assert len(records) == 30 and sum(margins[-5:]) > sum(margins[:5]) + 2.5
    assert sum(record["reward_accuracy"] for record in records[-5:]) > 4
    assert records[-1]["val_reward_accuracy"] == 1
    assert not any("alarm" in record for record in records) and "warning" not in err
    code, shown, _ = in_process("watch", run, "--once")
    assert code == 0 and "margin " in shown and "accuracy " in shown
    assert in_process("report", run)[0] == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Rewards of answers" in page and "margin of rewards" in page
