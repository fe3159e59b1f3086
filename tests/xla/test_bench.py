"""The benchmark of what PyTorch/XLA costs the host: what a step records, counted, on a small model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nxtrain.backends.xla.environment import trace_environment
from nxtrain.tools.bench.train import OURS, PEER
from nxtrain.tools.bench.xla import TRACE, LazyWorkload, summarize
from tests.support.xla_processes import FAST, nxtrain, start

MICRO_BATCHES = 2


def counted(side: str, file: Path) -> None:
    """Write the counters of PyTorch/XLA over one step that is not the first."""
    from torch_xla.debug import metrics

    from nxtrain.tools.bench import xla

    turn = getattr(xla, side)(LazyWorkload(layers=2, micro_batches=MICRO_BATCHES, steps=1))
    for _ in range(3):
        turn()
    metrics.clear_all()
    turn()
    result = {name: metrics.counter_value(name) for name in metrics.counter_names()}
    file.write_text(json.dumps(result), encoding="utf-8")


def counters(side: str, folder: Path) -> dict[str, int]:
    """Counters of a side in a process of its own."""
    env = {**trace_environment(os.environ), "OMP_NUM_THREADS": "1", "XLA_FLAGS": FAST}
    done = start(counted, side, folder / side, env=env, log=folder / f"{side}.txt").ended(250)
    assert done.code == 0, done.printed
    result: dict[str, int] = json.loads((folder / side).read_text(encoding="utf-8"))
    return result


def test_a_step_asks_no_more_of_the_host_than_one_of_transformers(tmp_path: Path) -> None:
    ours, peer = counters("ours", tmp_path), counters("peer", tmp_path)
    assert "UncachedCompile" not in ours
    assert [name for name in ours if name.startswith("aten::")] == [], "operations that leave the device, such as reads"
    assert ours["ExecuteComputation"] == MICRO_BATCHES + 1 <= peer["ExecuteComputation"]
    assert ours["CreateXlaTensor"] <= peer["CreateXlaTensor"]
    recorded, theirs = (sum(n for name, n in actual.items() if name.startswith("xla::")) for actual in (ours, peer))
    assert recorded <= theirs


def test_the_command_measures_every_side_in_every_round(tmp_path: Path) -> None:
    """It, and the processes that it starts, are forks of one that has imported torch-xla."""
    argv = ("bench", "xla", "--layers", "1", "--rounds", "2", "--steps", "1", "--micro-batches", "1", "--json")
    done = nxtrain(*argv, env=os.environ, log=tmp_path / "log.txt").ended(250)
    assert done.code == 0, done.printed
    result = json.loads(done.printed[done.printed.index("{") :])
    assert len(result["ratios"]) == 2
    assert (
        min(*result["ratios"], result["trace_s_per_rank"], *(result[side]["host_ms_per_step"] for side in (OURS, PEER)))
        > 0
    )


def test_a_round_in_which_the_machine_was_slow_changes_no_ratio() -> None:
    result = summarize({OURS: [0.1, 1.0, 0.1], PEER: [0.2, 2.0, 0.2], TRACE: [1.0, 9.0, 2.0]})
    assert result["ratios"] == [2.0, 2.0, 2.0]
    assert result[OURS]["host_ms_per_step"] == pytest.approx(100)
    assert result["trace_s_per_rank"] == 2.0
