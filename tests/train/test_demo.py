"""The demo of the README, shortened."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from nxtrain.train.generate import generate
from nxtrain.train.sampling import Sampling

ROOT = Path(__file__).parents[2]


def test_the_demo_trains_writes_and_exports() -> None:
    done = subprocess.run(
        ["bash", "scripts/demo.sh", "--short"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
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
    assert re.search(r"scores differ from ours by at most \d", done.stdout)
    text = "".join(generate(str(run), "def ", max_new_tokens=64, sampling=Sampling(), seed=0))  # the command's defaults
    assert f"\n{text}\n" in done.stdout
    assert text.startswith("def ")
    assert len(text) > len("def ") + 20
    assert (run / "huggingface" / "model.safetensors").exists()
