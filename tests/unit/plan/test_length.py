"""Length of a planned run of epochs: that of its steps where a header gives the rows, else unknown with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from nxtrain.cli.main import app

TINY = str(Path(__file__).parents[3] / "configs/tiny_cpu.toml")
ON = (
    "train.micro_batch=1",
    "train.eval_every=0",
    "data.validation_fraction=0",
    *("--instance", "p5.48xlarge", "--price", "10"),
)
KEYS = ("days", "cost_usd", "step_time_s")


def answer(*argv: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", TINY, *ON, *map(str, argv), "--json"])
    assert result.exit_code == 0, result.output
    actual: dict[str, Any] = json.loads(result.output)
    return actual


def write_rows(file: Path, num_rows: int, width: int) -> None:
    """Write a token file whose ids take no blocks of the disk."""
    with file.open("wb") as opened:
        header = {"descr": "<i4", "fortran_order": False, "shape": (num_rows, width)}
        np.lib.format.write_array_header_1_0(opened, header)
        opened.truncate(opened.tell() + num_rows * width * 4)


@pytest.mark.parametrize("seed", range(5))
def test_epochs_of_a_token_file_are_planned_as_their_steps(tmp_path: Path, seed: int) -> None:
    draw = Random(seed)
    num_rows, batch, epochs = draw.randint(1, 20_000_000), 8 * draw.randint(1, 9), round(draw.uniform(0.1, 4), 2)
    write_rows(tmp_path / "rows.npy", num_rows, 65)
    run = ["data.source=tokens", f"data.path={tmp_path}/rows.npy", "train.seq_len=64", f"train.global_batch={batch}"]
    run += ["optim.warmup_steps=0"]
    steps = math.ceil(epochs * num_rows / batch)
    actual = answer(*run, f"train.epochs={epochs}")
    wanted = answer(*run, f"train.steps={steps}")
    assert actual["run"]["steps"] == steps
    assert actual["run"]["tokens"] == steps * batch * 64
    assert {key: actual[key] for key in KEYS} == {key: wanted[key] for key in KEYS}
    assert actual["reasons"] == [] and actual["days"] > 0 and actual["cost_usd"] > 0
    shown = CliRunner().invoke(app, ["plan", TINY, *ON, *run, f"train.epochs={epochs}"]).output.split()
    words = f"{epochs:g} epochs of {num_rows:,} rows in {tmp_path}/rows.npy: train.steps={steps}".split()
    assert shown[: len(words)] == words
    searched = answer(*run, f"train.epochs={epochs}", "--search")
    assert {layout["run"]["steps"] for layout in searched["layouts"]} == {steps}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (("data.source=tokens", "data.path=absent.npy"), "absent.npy cannot be read: No such file"),
        (("data.source=tokens", "data.path=s3://bucket/rows.npy"), "s3://bucket/rows.npy is in object storage"),
        (("data.source=tokens", "data.path=narrow.npy"), "has rows of 9 ids, but train.seq_len="),
        (("data.source=tokens", "data.path=text.npy"), "text.npy is not a .npy array"),
        (("data.source=text", "data.path=docs"), "no start has prepared the text in runs/tiny_cpu/data"),
        (("data.source=stdlib",), "no start has prepared the text in runs/tiny_cpu/data"),
    ],
)
def test_an_unknown_length_is_reported_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "narrow.npy", 7, 9)
    (tmp_path / "text.npy").write_text("no array")
    result = answer(*data, "train.epochs=2")
    (reason,) = result["reasons"]
    assert words in reason and "give train.steps=... with train.epochs=0, or --tokens" in reason
    assert result["fits"], "the memory does not depend on the length"
    assert (result["days"], result["cost_usd"]) == (None, None)
    assert {result["run"][key] for key in ("steps", "tokens", "device_hours", "flops", "days_with_failures")} == {None}
    shown = CliRunner().invoke(app, ["plan", TINY, *ON, *data, "train.epochs=2"], terminal_width=500)
    assert (shown.exit_code, "time, cost" in shown.output) == (0, True), shown.output
    assert reason[:60] in " ".join(shown.output.split())
    for length in (("train.epochs=0", "train.steps=50", "optim.warmup_steps=5"), ("train.epochs=2", "--tokens", "1e9")):
        given = answer(*data, *length)
        assert given["reasons"] == [] and given["days"] > 0
