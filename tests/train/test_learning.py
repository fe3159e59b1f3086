"""A small model learns, and a run that diverges says so."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxtrain.backends.cpu import CpuBackend
from nxtrain.tools.eval.command import Options, evaluate
from tests.support.float8 import RECIPES
from tests.support.models import BASE
from tests.support.ranks import RankPool
from tests.support.runs import SEQ_LEN, course, run_plan, train_rank


def losses_of_a_rule(tmp_path: Path, name: str, **how: Any) -> list[float]:
    """Losses of a run on rows in which each id decides the next, and all are equally common."""
    generator = np.random.default_rng(0)
    follower = generator.permutation(BASE["vocab_size"])
    rows = [generator.integers(0, BASE["vocab_size"], 256)]
    for _ in range(SEQ_LEN):
        rows.append(follower[rows[-1]])
    np.save(tmp_path / "rows.npy", np.stack(rows, axis=1))
    data = {"source": "tokens", "path": str(tmp_path / "rows.npy")}
    train = {"global_batch": 32, "micro_batch": 32}
    run = tmp_path / name
    train_rank(CpuBackend(), run_plan(run, data, train=train, optim={"warmup_steps": 5}, **how))
    return [record["loss"] for record in course(run)]


def test_a_rule_without_exceptions_is_learnt_to_the_end(tmp_path: Path) -> None:
    """The loss of log(128) = 4.85 nats without context is 0 with it."""
    losses = losses_of_a_rule(tmp_path, "run", steps=80)
    assert losses[0] == pytest.approx(math.log(BASE["vocab_size"]), abs=0.3)
    assert losses[-1] < 0.2


def test_float8_learns_as_bfloat16_does(tmp_path: Path) -> None:
    types = {"params": "bf16", "update": "fp32_master"}
    plain = losses_of_a_rule(tmp_path, "bf16", steps=20, precision=types)
    assert plain[-1] < 0.5
    for recipe in RECIPES:
        losses = losses_of_a_rule(tmp_path, recipe, steps=20, precision={**types, "fp8": recipe})
        assert losses == pytest.approx(plain, rel=0.08), recipe
        assert losses != plain, recipe


def test_held_out_text_is_predicted_better_than_by_the_frequency_of_its_tokens(ranks: RankPool, tmp_path: Path) -> None:
    """The source of two modules of the standard library, on two ranks with sequence parallelism, end to end."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, module in enumerate((argparse, ast)):
        # Documents are held out whole, so there must be several.
        for start, part in enumerate(inspect.getsource(module).split("\nclass ")):
            (texts / f"{number}-{start}.txt").write_text(part, encoding="utf-8")
    resolved = run_plan(
        tmp_path / "run",
        {"source": "text", "path": str(texts), "validation_fraction": 0.1},
        steps=100,
        model={"config": {"vocab_size": 384}},
        parallel={"tp": 2, "sequence_parallel": True},
        train={"seq_len": 32, "global_batch": 32, "micro_batch": 32, "eval_every": 50, "eval_batches": 4},
        optim={"warmup_steps": 10},
        checkpoint={"every": 50},
    )
    ranks.run(2, train_rank, resolved)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["val_loss"] < summary["unigram_entropy"] - 0.5, summary
    evaluated = {record["step"]: record["val_loss"] for record in course(tmp_path / "run") if "val_loss" in record}
    assert list(evaluated) == [50, 100]
    assert evaluated[100] == summary["val_loss"] < evaluated[50]
    # The same checkpoints, of two ranks, are evaluated on one by the text that the run holds out.
    half, whole = evaluate(str(tmp_path / "run"), Options(("held_out", "cloze"), every=True))
    assert (half.model.step, whole.model.step, half.texts) == (50, 100, "held-out text of the run")
    half_bits, bits = (item.tasks["held_out"]["bits_per_byte"] for item in (half, whole))
    assert bits == pytest.approx(summary["bits_per_byte"], rel=0.1)
    assert bits < half_bits  # type: ignore[operator]
    assert half.tasks["cloze"]["accuracy"] < whole.tasks["cloze"]["accuracy"]  # type: ignore[operator]
