"""What gloo ranks saved under any layout goes on on an XLA device with the losses that it would have had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import RankPool, ranks  # noqa: F401  # a fixture
from tests.support.resharding import LAYOUTS, after, plan, world_of
from tests.support.runs import token_file, train_rank

ROOT = Path(__file__).parents[2]


def test_the_next_losses_are_those_of_the_run_that_was_saved(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
) -> None:
    rows = token_file(tmp_path / "rows.npy", num_rows=40)
    for name, layout in LAYOUTS.items():
        ranks.run(world_of(layout), train_rank, plan(tmp_path / name, layout, rows))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.xla_resharding", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in LAYOUTS:
        found, expected = after(tmp_path / f"xla-{name}"), after(tmp_path / name)
        assert len(found) == len(expected) == 5
        for ours, theirs in zip(found, expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6), name
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5), name
