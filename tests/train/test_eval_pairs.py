"""`nxtrain eval --pairs` measures preferences as transformers does; files that are not pairs are errors for people."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nxtrain.data.arrow.prepared import PreparedCorpus
from tests.support.commands import in_process
from tests.support.models import TEXT, text_model

WORDS = TEXT.split()


def prepared(folder: Path, rows: list[dict[str, str]], option: str = "--pairs") -> Path:
    source, out = folder / f"rows{option}.jsonl", folder / f"out{option}.arrow"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    told = in_process("data", "prepare", source, option, "--tokenizer", folder / "model", "--out", out, "--restart")
    assert told[0] == 0, told
    return out


def drawn_pairs(rng: Random, number: int) -> list[dict[str, str]]:
    def text(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))

    return [
        {"prompt": text(4), "chosen": f" {text(3)}", "rejected": f" {text(5)} {number}"} for number in range(number)
    ]


def sums_of(model_folder: Path, corpus: PreparedCorpus) -> Any:
    """Log-probability and number of the tokens of each answer by transformers, (documents, 2)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    found = []
    for document in range(len(corpus)):
        ids = torch.tensor(corpus.ids(document).tolist())
        targets = ids[1:].clone()
        targets[: max(0, corpus.prompt(document, corpus.content(document)) - 1)] = -100
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0].double()
        found.append((-F.cross_entropy(logits, targets, reduction="sum").item(), int((targets >= 0).sum())))
    return np.array(found)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    for name, shape in (("model", "gqa2"), ("base", "mha")):
        text_model(folder / name, shape)
    return folder


def test_rewards_are_those_of_transformers(models: Path) -> None:
    corpus = prepared(models, drawn_pairs(Random(3), 23))
    ours, base = (sums_of(models / name, PreparedCorpus(corpus)) for name in ("model", "base"))
    for given, rewards in (
        ((), ours[:, 0]),
        (("--reference", models / "base", "--beta", "0.3"), 0.3 * (ours[:, 0] - base[:, 0])),
    ):
        code, text, said = in_process("eval", models / "model", "--pairs", corpus, "--json", *given)
        assert code == 0, said
        found = json.loads(text)["tasks"]["preferences"]
        assert (found["n"], found["left_out"], found["chance"]) == (23, 0, 0.5)
        assert found["accuracy"] == pytest.approx((rewards[::2] > rewards[1::2]).mean())
        assert found["reward_chosen"] == pytest.approx(rewards[::2].mean(), rel=1e-5)
        assert found["reward_rejected"] == pytest.approx(rewards[1::2].mean(), rel=1e-5)
        assert found["margin"] == pytest.approx(rewards[::2].mean() - rewards[1::2].mean(), rel=1e-4, abs=1e-5)
    means = ours[:, 0] / ours[:, 1]
    found = json.loads(in_process("eval", models / "model", "--pairs", corpus, "--json")[1])["tasks"]["preferences"]
    assert found["accuracy_per_token"] == pytest.approx((means[::2] > means[1::2]).mean())
    code, text, _ = in_process("eval", models / "model", "--pairs", corpus, "--limit", "7")
    assert code == 0 and "preferences" in text and "n=7" in text


def test_what_is_no_file_of_pairs_is_refused_with_a_way_out(models: Path) -> None:
    labels = prepared(models, [{"prompt": "a", "completion": "b", "label": True}], "--labels")  # type: ignore[dict-item]
    other = prepared(models, drawn_pairs(Random(4), 3))
    text_model(models / "stranger")
    content = (models / "stranger" / "tokenizer.json").read_bytes()
    (models / "stranger" / "tokenizer.json").write_bytes(content + b" ")
    for given, code, reason in (
        (("model", "--pairs", labels), 3, "holds no pairs; prepare them with nxtrain data prepare --pairs"),
        (("model", "--pairs", models / "model" / "config.json"), 3, "prepare it"),
        (("stranger", "--pairs", other), 3, "has ids of another tokenizer than that of"),
        (("model", "--reference", models / "base"), 2, "give their file by --pairs FILE.arrow"),
    ):
        found = in_process("eval", models / str(given[0]), *given[1:])
        said = " ".join(found[2].split())
        assert found[0] == code and reason in said and "Traceback" not in said, found


def test_damaged_files_of_pairs_are_errors_of_data(models: Path) -> None:
    """Bytes are changed or cut away at drawn places; every change is noticed when it is read, or changes nothing."""
    corpus, rng = prepared(models, drawn_pairs(Random(5), 9)), Random(6)
    sound, damaged = corpus.read_bytes(), corpus.with_name("damaged.arrow")
    whole = in_process("eval", models / "model", "--pairs", corpus, "--json")
    wanted = json.loads(whole[1])["tasks"]["preferences"]
    codes = []
    for _ in range(30):
        content = bytearray(sound)
        at = rng.randrange(len(content))
        if rng.random() < 0.3:
            del content[at:]
        else:
            content[at] ^= 1 << rng.randrange(8)
        damaged.write_bytes(content)
        code, text, said = in_process("eval", models / "model", "--pairs", damaged, "--json")
        assert "Traceback" not in said, said
        codes.append(code)
        if code == 0:
            assert json.loads(text)["tasks"]["preferences"] == wanted
        else:
            assert code == 3 and damaged.name in " ".join(said.split()), said
    assert codes.count(3) > 15
