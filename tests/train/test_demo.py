"""The demo of the README, shortened."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess

import pytest

from nxtrain.metrics.progress import LINE_EVERY_S
from nxtrain.tools.eval.generate import Sampling
from nxtrain.tools.report.loss_chart import ASCII, BRAILLE, loss_chart
from tests.support import ROOT
from tests.support.commands import in_process
from tests.support.models import continued
from tests.train.test_screen import EXPORT, NUMBER, RUN, assert_all_ours

UNSET = {"PJRT_DEVICE", "USE_TORCH_XLA"}
"""Variables of these tests under which torch-xla prints no lines of its own."""


def test_the_demo_trains_writes_and_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = subprocess.run(
        ["bash", "scripts/demo.sh", "--short"],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if name not in UNSET} | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = ROOT / "runs" / "demo-short"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 20
    assert records[-1]["loss"] < records[0]["loss"] - 1
    summary = json.loads((run / "summary.json").read_text())
    assert summary["val_loss"] < records[0]["loss"] - 1
    assert "NeuronX Distributed" not in done.stderr  # there was nothing to choose from
    assert f"unigram entropy of the same tokens {summary['unigram_entropy']:.4f}" in done.stderr
    assert f"{summary['bits_per_byte']:.4f} bits per byte" in done.stderr
    assert summary["val_bytes"] > summary["val_tokens"] > 0
    bits = summary["val_loss"] / math.log(2) * summary["val_tokens"] / summary["val_bytes"]
    assert summary["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert re.search(r"scores differ from ours by at most \d", done.stdout)
    text = continued(run, "    def __init__(self", 120, Sampling(temperature=0.5))
    assert f"\n{text}\n" in done.stdout
    assert text.startswith("    def __init__(self")
    assert len(text) > len("    def __init__(self") + 20
    assert (run / "huggingface" / "model.safetensors").exists()
    charts = [loss_chart(records, 79, style) for style in (BRAILLE, ASCII)]  # which one depends on the locale
    assert any(done.stdout.endswith(f"\n{chart}\n") for chart in charts), done.stdout
    assert "\nreport: runs/demo-short/report.html\n" in done.stderr
    assert "Gradient norm" in (run / "report.html").read_text(encoding="utf-8")
    _check_lines_are_ours(done, text)
    _check_next_commands(done.stderr)


def _check_lines_are_ours(done: subprocess.CompletedProcess[str], text: str) -> None:
    """Every line of the run and of the export is nxtrain's own, and a pipe gets no control sequences."""
    _, trained, exported, *_ = re.split(r"^=== .*\n", done.stderr, flags=re.MULTILINE)
    assert_all_ours(trained.splitlines(), (*RUN, rf"step \d+/20  loss {NUMBER}  {NUMBER} tokens/s  .*"))
    steps = [int(re.findall(r"\d+", line)[0]) for line in trained.splitlines() if line.startswith("step ")]
    assert (steps[0], steps[-1]) == (1, 20)
    assert len(steps) < 20, f"a line in {LINE_EVERY_S} seconds is enough for a log"
    written = done.stdout.partition(f"{text}\n")[0].splitlines()
    assert_all_ours([*exported.splitlines(), *filter(None, written)], (*RUN, *EXPORT))


def _check_next_commands(shown: str) -> None:
    """The last lines name three commands, of which each one starts as it stands there."""
    *_, heading, generates, trains, draws = shown.splitlines()
    assert heading == f"=== done; the run folder is runs/demo-short. Three commands to try next, in {ROOT.resolve()}:"
    started = _shell(trains.replace("  #", " --dry-run  #"))
    program, *words = shlex.split(generates)
    assert trains.startswith(f"{program} ")
    code, sampled, _ = in_process(*words, "--seed", "1")
    assert (code, sampled[:5]) == (0, "class")
    assert "-m nxtrain train configs/demo.toml run.name=mine data.source=text data.path=docs" in started.stdout
    assert (ROOT / "docs").is_dir()
    program, option, folder = shlex.split(draws, comments=True)
    assert _shell(f"{program} --version").stdout
    assert option == "--logdir"
    assert list((ROOT / folder / "tensorboard").iterdir())


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
