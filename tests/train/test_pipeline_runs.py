"""Whole runs through pipeline stages record what a run on one rank records, and go on as one another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nxtrain.backends.cpu import CpuBackend
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from tests.support import forked_python
from tests.support.commands import command
from tests.support.models import hf_model
from tests.support.ranks import RankPool
from tests.support.runs import assert_equal_bits, course, run_plan, state_at, token_file, train_rank, write_toml

STEPS = 4
ALONE: dict[str, Any] = {"tp": 1, "dp": 1}


class Runs:
    """Runs of five blocks on one file of tokens, two micro-batches to a step."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.data = {"source": "tokens", "path": str(token_file(folder / "rows.npy", num_rows=18))}

    def plan(self, name: str, parallel: dict[str, Any], *, tied: bool = False, **sections: Any) -> Resolved:
        sections["model"] = {
            **sections.get("model", {}),
            "config": {"num_hidden_layers": 5, "tie_word_embeddings": tied},
        }
        sections["train"] = {"steps": STEPS, "micro_batch": 2, **sections.get("train", {})}
        sections["optim"] = {"decay_steps": STEPS, **sections.get("optim", {})}
        return run_plan(self.folder / name, self.data, steps=STEPS, parallel=parallel, **sections)

    def run(self, resolved: Resolved) -> list[dict[str, Any]]:
        degrees = resolved.config.parallel
        self.ranks.run(degrees.tp * degrees.pp * degrees.dp, train_rank, resolved)
        return course(resolved.config.run.dir)


@pytest.fixture
def runs(ranks: RankPool, tmp_path: Path) -> Runs:
    return Runs(ranks, tmp_path)


# Of 0.3 million parameters: an update of half a unit in the last place is lost or not by the last bit of its gradient,
# and so by the order of a sum. A share is a count, and may differ by a few of these.
COUNTED = {"lost_update_frac": 2e-5}


def assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]], *, rel: float = 2e-5) -> None:
    """Hold two courses against each other, whose sums over the model may have other orders."""
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == {key: pytest.approx(value, rel=rel, abs=COUNTED.get(key, 1e-9)) for key, value in theirs.items()}


@pytest.mark.parametrize(
    ("parallel", "tied"),
    [
        ({"tp": 1, "dp": 1, "pp": 2}, False),
        ({"tp": 1, "dp": 1, "pp": 2, "virtual_pp": 2}, True),
        ({"tp": 2, "dp": 1, "pp": 2, "sequence_parallel": True}, True),
        ({"tp": 1, "dp": 2, "pp": 2, "shard": "full"}, True),
    ],
    ids=["pp2", "pp2-v2-tied", "tp2-pp2-tied", "pp2-full-tied"],
)
def test_stages_record_what_one_rank_records(runs: Runs, parallel: dict[str, Any], tied: bool) -> None:
    """At so small a rate that rounding loses many updates: an embedding that counts twice would show in each record."""
    optim = {"lr": 3e-10, "min_lr": 3e-10}
    micro = {"micro_batch": 2 // parallel["dp"]}
    expected = runs.run(runs.plan("alone", ALONE, tied=tied, optim=optim))
    assert all(0.1 < record["lost_update_frac"] < 0.9 for record in expected)
    assert_same(runs.run(runs.plan("staged", parallel, tied=tied, optim=optim, train=micro)), expected, rel=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_hugging_face_reach_every_stage(runs: Runs, tied: bool) -> None:
    folder = runs.folder / "hf"
    hf_model(runs.plan("shape", ALONE, tied=tied)).save_pretrained(folder)
    model = {"init": "hf", "hf": str(folder)}
    expected = runs.run(runs.plan("alone", ALONE, tied=tied, model=model))
    actual = runs.run(runs.plan("staged", {"tp": 1, "dp": 1, "pp": 2}, tied=tied, model=model))
    assert_same(actual, expected)
    drawn = runs.run(runs.plan("drawn", ALONE, tied=tied, train={"steps": 1}))
    assert abs(drawn[0]["param_norm"] / expected[0]["param_norm"] - 1) > 0.1


def test_stochastic_rounding_does_not_know_the_stages(runs: Runs) -> None:
    """Without a clip, since the norm is summed in an order that the stages decide, not a bit may differ."""
    precision = {"params": "bf16", "update": "bf16_stochastic", "state": "bf16"}
    plans = [
        runs.plan(name, parallel, precision=precision, optim={"clip": 0.0})
        for name, parallel in [("alone", ALONE), ("staged", {"tp": 1, "dp": 1, "pp": 2, "virtual_pp": 2})]
    ]
    expected, actual = (runs.run(plan) for plan in plans)
    assert [record["loss"] for record in actual] == [record["loss"] for record in expected]
    states = [runs.ranks.run(1, state_at, plan.config.run.dir, STEPS, plan)[0] for plan in plans]
    assert_equal_bits(*states)


def test_a_run_is_launched_in_stages_and_resumed_in_others(tmp_path: Path) -> None:
    """By the commands that people type, from and to the folder of one run, which evaluates after every step.

    The rate is low: at 0.01 the norm of one rank alone changes by 1e-4 with the order of its sums.
    """
    texts, random = tmp_path / "texts", Random(5)
    texts.mkdir()
    vocabulary = ["".join(random.choices("etaoinshrdlu", k=random.randint(2, 8))) for _ in range(300)]
    for number in range(20):
        (texts / f"{number}.txt").write_text(" ".join(random.choices(vocabulary, k=2000)), encoding="utf-8")
    config = write_toml(
        tmp_path,
        model={"preset": "tiny", "config": {"num_hidden_layers": 5, "tie_word_embeddings": True}},
        train={"seq_len": 32, "global_batch": 8, "micro_batch": 2, "eval_every": 1, "eval_batches": 2},
        optim={"lr": 2e-3, "min_lr": 1e-3, "warmup_steps": 1, "decay_steps": 6},
        data={"source": "text", "path": texts, "validation_fraction": 0.2},
    )

    def plan(file: Path, *overrides: str) -> Resolved:
        return resolve_config(load(file, overrides), 1)

    straight = plan(config, f"run.dir={tmp_path / 'straight'}", "train.steps=6")
    train_rank(CpuBackend(), straight)
    expected = course(tmp_path / "straight")
    assert all(record["val_loss"] > 0 for record in expected)

    folder = tmp_path / "staged"
    stages = ("parallel.pp=2", "parallel.virtual_pp=2", "parallel.pipeline_cuts=[1, 2, 4]")
    words = ("launch", config, f"run.dir={folder}", "train.steps=2", *stages)
    code, said = command(tmp_path, *words, first=forked_python.command, within_s=100.0)
    assert code == 0, said
    assert "2 ranks: pp 2 of 2 chunks each, tp 1, dp 1" in said
    assert f"{straight.dimensions.num_params:,} parameters" in said
    assert_same(course(folder), expected[:2])

    own = folder / "config.toml"
    assert load(own).config.parallel.pipeline_cuts == (1, 2, 4)
    alone = ("parallel.pp=1", "parallel.virtual_pp=1", "parallel.pipeline_cuts=[]")
    train_rank(CpuBackend(), plan(own, "train.steps=4", *alone))
    assert_same(course(folder), expected[:4])

    options = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    program = ("-m", "nxtrain", "train", str(own), "train.steps=6", "parallel.pp=2")
    argv = (sys.executable, "-m", "torch.distributed.run", *options, *program)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "continues after step 4" in done.stderr
    assert_same(course(folder), expected)
