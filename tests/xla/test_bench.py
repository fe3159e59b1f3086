"""The benchmark of what PyTorch/XLA costs the host: what a step records, counted, on a small model.

A host's speed is no test on a machine that others use; the number of tensors, operations and graphs is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from nxtrain.backends.xla.tracing import trace_environment
from nxtrain.bench.train import OURS, PEER
from nxtrain.bench.xla import TRACE, summarize

MICRO_BATCHES = 2
COUNTED = """
import json, sys
import torch_xla.debug.metrics as metrics
from nxtrain.bench import lazy
from nxtrain.bench.xla import LazyWorkload
turn = getattr(lazy, sys.argv[1])(LazyWorkload(layers=2, micro_batches=int(sys.argv[2]), steps=1))
for _ in range(3):
    turn()
metrics.clear_all()
turn()
print(json.dumps({name: metrics.counter_value(name) for name in metrics.counter_names()}))
"""


def counters(side: str) -> dict[str, int]:
    """Counters of PyTorch/XLA over one step that is not the first."""
    env = {**trace_environment(os.environ), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", COUNTED, side, str(MICRO_BATCHES)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_step_asks_no_more_of_the_host_than_one_of_transformers() -> None:
    ours, peer = counters("ours"), counters("peer")
    assert "UncachedCompile" not in ours
    assert [name for name in ours if name.startswith("aten::")] == [], "operations that leave the device, such as reads"
    assert ours["ExecuteComputation"] == MICRO_BATCHES + 1 <= peer["ExecuteComputation"]
    assert ours["CreateXlaTensor"] <= peer["CreateXlaTensor"]
    recorded, theirs = (sum(n for name, n in found.items() if name.startswith("xla::")) for found in (ours, peer))
    assert recorded <= theirs


def test_the_command_measures_every_side_in_every_round() -> None:
    argv = [sys.executable, "-m", "nxtrain", "bench", "xla", "--layers", "2", "--rounds", "2", "--steps", "1", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["ratios"]) == 2
    assert (
        min(*found["ratios"], found["trace_s_per_rank"], *(found[side]["host_ms_per_step"] for side in (OURS, PEER)))
        > 0
    )


def test_a_round_in_which_the_machine_was_slow_changes_no_ratio() -> None:
    found = summarize({OURS: [0.1, 1.0, 0.1], PEER: [0.2, 2.0, 0.2], TRACE: [1.0, 9.0, 2.0]})
    assert found["ratios"] == [2.0, 2.0, 2.0]
    assert found[OURS]["host_ms_per_step"] == pytest.approx(100)
    assert found["trace_s_per_rank"] == 2.0
