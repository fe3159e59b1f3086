"""Tokens of a teacher: written by the command as transformers ranks them, trained on, and resumed in the middle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from nxtrain.backends.base import Backend
from nxtrain.common.vocab import PROBABILITY_UNITS
from nxtrain.config.check import Resolved
from nxtrain.data.samples import FileSamples
from nxtrain.data.storage import LocalFile
from nxtrain.tools.eval.teach import teach_on
from nxtrain.tools.eval.trained import Trained
from tests.support.commands import in_process, output_of
from tests.support.ranks import RankPool
from tests.support.runs import SEQ_LEN, assert_equal_bits, course, records, run_plan, state_at, train_rank

ROWS, K, STEPS = 8, 4, 6


def taught(folder: Path, hf: Path) -> tuple[Path, Path]:
    """Rows, and the file that the command writes for them."""
    rows, out = folder / "rows.npy", folder / "taught.npy"
    np.save(rows, np.random.default_rng(0).integers(0, 300, (ROWS, SEQ_LEN + 1)))
    output_of("data", "teach", hf, "--rows", rows, "--out", out, "--k", K)
    return rows, out


def test_the_command_writes_the_likeliest_tokens_of_transformers(hf: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows, out = taught(tmp_path, hf)
    code, _, said = in_process("data", "teach", hf, "--rows", rows, "--out", out, "--k", K)
    ids, units = np.load(out).reshape(ROWS, 2, K, SEQ_LEN).transpose(1, 0, 3, 2)
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(np.load(rows)[:, :-1])).logits
    top, wanted = logits.softmax(-1).topk(K)
    assert (ids == wanted.numpy()).mean() > 0.99, "but for ties"
    torch.testing.assert_close(torch.from_numpy(units / PROBABILITY_UNITS), top.double(), rtol=1e-4, atol=1e-6)
    share = f"{top.sum(-1).mean():.1%} of the teacher's probability"
    words = f"{out}: {K} tokens for each of {ROWS * SEQ_LEN:,} targets, with {share} on average"
    assert code == 0 and words in " ".join(said.split())
    code, _, errors = in_process("data", "teach", hf, "--rows", rows, "--out", out, "--k", 301)
    assert code == 2 and "--k 301 exceeds the 300 tokens" in errors


def test_rows_that_are_no_table_and_the_rows_as_the_result_are_refused(hf: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.npy", tmp_path / "taught.npy"
    for table, problem in (
        (np.array(3), "int64 of shape ()"),
        (np.zeros((4, 1), int), "has rows of 1 ids"),
        (np.full((4, SEQ_LEN + 1), 300), "or take the teacher, of the tokenizer that made the file"),
    ):
        np.save(rows, table)
        code, _, errors = in_process("data", "teach", hf, "--rows", rows, "--out", out)
        assert code == 3 and problem in errors and not out.exists()
    before = rows.read_bytes()
    code, _, errors = in_process("data", "teach", hf, "--rows", rows, "--out", tmp_path / "." / "rows.npy")
    assert code == 2 and "is the same file as --rows" in errors and rows.read_bytes() == before


def test_logits_that_are_not_finite_end_the_command(hf: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.npy", tmp_path / "taught.npy"
    np.save(rows, np.zeros((2, SEQ_LEN + 1), int))
    broken = shutil.copytree(hf, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    code, _, errors = in_process("data", "teach", broken, "--rows", rows, "--out", out)
    assert code == 6 and "not finite in row 0" in errors and not out.exists()


def test_a_teacher_needs_no_tokenizer(hf: Path, tmp_path: Path) -> None:
    _, out = taught(tmp_path, hf)
    bare = shutil.copytree(hf, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert not (bare / "tokenizer.json").exists()
    output_of("data", "teach", bare, "--rows", tmp_path / "rows.npy", "--out", tmp_path / "again.npy", "--k", K)
    assert (tmp_path / "again.npy").read_bytes() == out.read_bytes()


def taught_by_ranks(backend: Backend, hf: Path, rows: Path, out: Path) -> None:
    samples = FileSamples(LocalFile(rows), seq_len=SEQ_LEN, vocab_size=300)
    teach_on(backend, Trained.find(str(hf)), samples, out, K)


def test_ranks_that_share_the_teacher_write_the_same_tokens(ranks: RankPool, hf: Path, tmp_path: Path) -> None:
    rows, out = taught(tmp_path, hf)
    ranks.run(2, taught_by_ranks, hf, rows, tmp_path / "shared.npy")
    of_one, of_two = (np.load(path).reshape(ROWS, 2, -1) for path in (out, tmp_path / "shared.npy"))
    assert (of_one[:, 0] == of_two[:, 0]).mean() > 0.99, "but for ties"
    assert np.abs(of_one[:, 1] - of_two[:, 1]).max() < 1e-5 * PROBABILITY_UNITS


def test_a_run_on_a_teacher_learns_it_and_is_resumed_with_the_same_bits(
    ranks: RankPool, hf: Path, tmp_path: Path
) -> None:
    rows, out = taught(tmp_path, hf)

    def planned(folder: str, steps: int, weight: float = 1.0) -> Resolved:
        data = {"source": "tokens", "path": str(rows), "teacher": str(out), "teacher_k": K, "teacher_weight": weight}
        shape = {"config": {"vocab_size": 300}}
        checkpoint = {"every": 1, "async": False}
        tables: dict[str, Any] = {"model": shape, "checkpoint": checkpoint, "optim": {"schedule": "constant"}}
        return run_plan(tmp_path / folder, data, steps=steps, **tables)

    straight = planned("straight", STEPS)
    ranks.run(1, train_rank, straight)
    for steps in (2, STEPS):
        ranks.run(1, train_rank, planned("parts", steps))
    assert course(tmp_path / "parts") == course(tmp_path / "straight")
    runs = [tmp_path / name for name in ("parts", "straight")]
    assert_equal_bits(*(ranks.run(1, state_at, run, STEPS, straight)[0] for run in runs))
    losses = [record["loss"] for record in records(tmp_path / "straight")]
    assert losses[-1] < losses[0]
    ranks.run(1, train_rank, planned("mixed", 1, weight=0.5))
    assert records(tmp_path / "mixed")[0]["loss"] != losses[0]
