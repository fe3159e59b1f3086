"""A run of epochs is the run of as many steps, in every start."""

from __future__ import annotations

import json
from pathlib import Path

from nxtrain.common.io.jsonl import read
from nxtrain.config.load import load
from tests.support.commands import errors_of, in_process, output_of, write_config


def test_a_run_of_epochs_is_that_of_its_steps(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=4, num_rows=18)
    batch = load(config).config.train.global_batch
    steps = -(-2 * 18 // batch)
    runs = {}
    for name, length in (("epochs", "train.epochs=2"), ("steps", f"train.steps={steps}")):
        run = tmp_path / name
        said = errors_of("train", config, f"run.dir={run}", length, code=0)
        assert (f"2 epochs of 18 rows: train.steps={steps}" in said) is (name == "epochs")
        written = load(run / "config.toml").config.train
        assert (written.steps, written.epochs) == (steps, 0)
        runs[name] = [(line["step"], line["loss"], line["lr"]) for line in read(run / "metrics.jsonl")]
    assert runs["epochs"] == runs["steps"]
    assert [step for step, *_ in runs["epochs"]] == list(range(1, steps + 1))
    output_of("train", config, f"run.dir={tmp_path}/epochs", "train.epochs=2")
    output_of("train", config, f"run.dir={tmp_path}/epochs", "train.epochs=3")
    assert [line["step"] for line in read(tmp_path / "epochs/metrics.jsonl")][-1] == -(-3 * 18 // batch)


def test_a_plan_of_epochs_knows_the_steps_of_prepared_text(tmp_path: Path) -> None:
    """Before a start has prepared the text, the length is unknown; afterwards it is that of the run."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    config = write_config(tmp_path, steps=4)
    run = tmp_path / "run"
    changes = ["data.source=text", f"data.path={texts}", f"run.dir={run}", "train.epochs=0.5", "train.eval_every=0"]
    argv = ("plan", config, *changes, "--json")
    out = output_of(*argv)
    before = json.loads(out)
    assert before["days"] is None and "no start has prepared the text" in before["reasons"][0]
    output_of("train", config, *changes)
    after = json.loads(in_process(*argv)[1])
    assert after["reasons"] == []
    assert after["run"]["steps"] == load(run / "config.toml").config.train.steps > 1
