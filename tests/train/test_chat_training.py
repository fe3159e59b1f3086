"""Training on conversations whose turns end with the end of text: its losses are those of transformers and AdamW."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxtrain.common.run_folder import METRICS_FILE
from nxtrain.config.schema import DataConfig
from nxtrain.data.batch_source import BatchOrder
from nxtrain.data.dataset import open_data
from nxtrain.data.loader import BatchShare
from nxtrain.data.tokenization import load_tokenizer
from tests.support.commands import command, in_process, write_config
from tests.support.conversations import (
    FAMILIES,
    VOCABULARY,
    Answered,
    answers_of,
    drawn_talks,
    pieces_of_whole,
    write_family,
    write_talks,
)
from tests.support.corpora import write_tokenizer
from tests.support.models import hf_model, plan

SEQ_LEN, GLOBAL_BATCH, STEPS = 192, 2, 3
DATA: Mapping[str, Any] = {
    "source": "arrow",
    "packing": "best_fit",
    "doc_mask": True,
    "shuffle": False,
    "workers": 0,
}


def answers_of_steps(folder: Path, documents: list[Answered]) -> Iterator[list[Answered]]:
    """Answers of each step, found in the rows that a run reads."""
    config = DataConfig.model_validate({**DATA, "path": str(folder / "talks.arrow")})
    data = open_data(
        config, seq_len=SEQ_LEN, vocab_size=VOCABULARY, workdir=folder / "w", leader=True, barrier=lambda: None
    )
    order = BatchOrder(BatchShare(GLOBAL_BATCH, 1), 0, False, doc_mask=True)
    for batch in data.source.batches(order).prefetched(0):
        rows = batch.inputs.reshape(-1, SEQ_LEN).tolist()
        yield [piece.document for row in rows for piece in pieces_of_whole(documents, row)]


def summed_loss(model: nn.Module, document: Answered) -> Tensor:
    """Loss of an answer behind its whole conversation."""
    ids = torch.tensor(document.ids)
    logits = model(ids[None]).logits[0, document.begin - 1 : -1]
    return nn.functional.cross_entropy(logits, ids[document.begin :], reduction="sum")


@pytest.mark.parametrize("family", ["chatml", "mistral", "qwen with blocks"])
def test_losses_and_norms_are_those_of_whole_conversations(tmp_path: Path, family: str) -> None:
    template, talks = FAMILIES[family], drawn_talks(Random(7), 9)
    tokenizer = write_family(tmp_path / "base", template)
    documents = [answer for talk in talks for answer in answers_of(tokenizer, template, talk)]
    talks_file = write_talks(tmp_path / "talks.jsonl", talks)
    corpus = tmp_path / "talks.arrow"
    output = in_process(
        "data", "prepare", talks_file, "--chat", "--field", "messages", "--tokenizer", tmp_path / "base",
        "--out", corpus,
    )  # fmt: skip
    assert output[0] == 0, output
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": SEQ_LEN}
    model = hf_model(plan("gqa2", model={"config": shape}), std=0.2)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "run.toml").write_text(f"[train]\nsteps = {STEPS}\n", encoding="utf-8")
    output = in_process(
        "train", tmp_path / "run.toml", f"run.dir={tmp_path / 'run'}", f"model.hf={tmp_path / 'base'}",
        "model.init=hf", "backend.name=cpu", f"data.path={corpus}", *(f"data.{k}={v}".lower() for k, v in DATA.items()),
        f"train.seq_len={SEQ_LEN}", f"train.global_batch={GLOBAL_BATCH}",
        "train.micro_batch=1", "optim.schedule=constant", "optim.lr=1e-3", "optim.weight_decay=0", "optim.clip=0",
        "metrics.log_every=1", "metrics.tensorboard=false", "metrics.progress=false",
    )  # fmt: skip
    assert output[0] == 0, output
    lines = (tmp_path / "run" / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for line, answers in zip(map(json.loads, lines), answers_of_steps(tmp_path, documents), strict=False):
        num_targets = sum(len(answer.ids) - answer.begin for answer in answers)
        optimizer.zero_grad()
        loss = sum((summed_loss(model, answer) for answer in answers), torch.zeros(())) / num_targets
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        assert line["targets"] == num_targets
        assert line["loss"] == pytest.approx(loss.item(), rel=2e-6)
        assert line["grad_norm"] == pytest.approx(float(nn.utils.get_total_norm(grads)), rel=1e-5)
    assert len(lines) == STEPS


def test_a_run_on_token_files_says_which_id_ends_documents(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 300)
    file = write_config(tmp_path, steps=1)
    given = (f"data.tokenizer={tokenizer}", "model.config.vocab_size=300")
    code, output = command(tmp_path, "train", file, "data.doc_mask=true", *given)
    assert code == 0, output
    loaded = load_tokenizer(tokenizer, 300)
    assert f"token files mark no documents, so that each id {loaded.end_id} ends one" in output
