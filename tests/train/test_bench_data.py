"""`nxtrain bench data` measures real work, and its figures follow from it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nxtrain.tools.bench.data_wait import LADDER
from tests.support.ports import patient_s


def test_the_loader_is_measured_beside_numpy() -> None:
    """The memory of a start is that of a Python that has imported nothing else."""
    argv = [sys.executable, "-m", "nxtrain", "bench", "data", "--rounds", "1", "--json"]
    argv += ["--mib", "2", "--seq-len", "128", "--text-mib", "1", "--file-mib", "256"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patient_s(280), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ids = {row["name"]: row["value"] for row in found["rows"]}
    loader = ids.pop("loader")
    assert list(ids) == ["numpy"]
    assert min(loader, *ids.values()) > 0
    assert found["ratios"] == {name: pytest.approx(loader / value) for name, value in ids.items()}
    text = {row["name"]: row for row in found["text"]["rows"]}
    assert list(text) == ["concat", "best_fit", "best_fit in a worker"]
    assert found["text"]["ratios"].keys() == found["text"]["inside"].keys() == text.keys()
    assert all(0 < inside < 1 for inside in found["text"]["inside"].values())
    for name, row in text.items():  # sums of times follow the machine's speed, and are near
        assert 0.5 < found["text"]["ratios"][name] / (row["value"] / row["bare"][0]) < 2
    wait = found["wait"]
    assert (wait["tokens_per_s"], set(wait["shares"])) == (1_000_000, {"text", "ids"})
    # Cores that tokenize half a million tokens a second each keep 1 million waiting; ids are packed much faster.
    assert 0 <= wait["shares"]["ids"] < wait["shares"]["text"] < 1
    rates = {0.0, *(part * wait["tokens_per_s"] for part in LADDER)}  # which of them depends on the load
    assert all(set(kept.values()) <= rates and "1" in kept for kept in wait["kept"].values())
    # A start that reads the documents would take their memory: the file is larger than the limit.
    assert found["start"]["mib"] >= 256
    assert found["start"]["rss_mib"] < 200
