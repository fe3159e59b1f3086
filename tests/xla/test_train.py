"""The product's own loop on an XLA device: records, evaluation, checkpoint and resume, like on the CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.xla_processes import FAST, compiled, nxtrain

ROOT = Path(__file__).parents[2]
COUNTED = "counted.txt"


def train(folder: Path, backend: str, *overrides: str) -> list[dict[str, float]]:
    """Train the tiny configuration in a process of its own and return its records."""
    text = folder / "text"
    if not text.exists():
        text.mkdir(parents=True)
        (text / "a.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(3000)))
    run = folder / backend
    argv = ["train", ROOT / "configs/tiny_cpu.toml", f"backend.name={backend}"]
    argv += [f"run.dir={run}", "data.source=text", f"data.path={text}", "metrics.log_every=1", "train.seq_len=32"]
    argv += ["model.config.vocab_size=300", "train.global_batch=8", "train.micro_batch=4", "optim.warmup_steps=2"]
    argv += [
        "train.steps=6",
        "compile.max_recompiles=0",
        "train.eval_every=3",
        "train.eval_batches=1",
        "checkpoint.every=4",
        *overrides,
    ]
    env = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": FAST, "XLA_METRICS_FILE": str(folder / COUNTED)}
    done = nxtrain(*argv, env=env, log=folder / "log.txt").ended(200)
    assert done.code == 0, done.printed
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_xla_is_the_run_on_cpu_and_resumes_where_it_stopped(tmp_path: Path) -> None:
    on_cpu, on_xla = train(tmp_path, "cpu"), train(tmp_path, "xla")
    # A micro-batch, the update, the parameters' health, the evaluation.
    assert compiled(tmp_path / COUNTED) == 4
    for key in ("param_norm_0", "param_norm_expected"):
        assert on_xla[0][key] == pytest.approx(on_cpu[0][key], rel=1e-6)
    for key in ("step", "loss", "grad_norm", "param_norm", "lr", "tokens"):
        assert [r[key] for r in on_xla] == pytest.approx([r[key] for r in on_cpu], rel=1e-5), key
    assert [r["val_loss"] for r in on_xla if "val_loss" in r] == pytest.approx(
        [r["val_loss"] for r in on_cpu if "val_loss" in r], rel=1e-5
    )
    resumed = train(tmp_path, "xla", f"checkpoint.resume={tmp_path / 'xla/checkpoints/step-00000004'}")
    assert compiled(tmp_path / COUNTED) == 4
    kept = ("step", "loss", "grad_norm", "param_norm")
    assert [[r[key] for key in kept] for r in resumed] == [[r[key] for key in kept] for r in on_xla]
