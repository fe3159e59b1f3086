"""Saved under one layout, a run goes on under another one with the losses that it would have had."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.ranks import RankPool
from tests.support.recovery import LAYOUTS, SAVED, after, continued, plan, world_of
from tests.support.runs import token_file, train_rank


class Straight:
    """Runs that never stopped, one for each layout."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.rows = token_file(folder / "rows.npy", num_rows=40)
        self.run = cache(self._run)

    def _run(self, layout: str) -> Path:
        folder = self.folder / layout
        self.ranks.run(world_of(LAYOUTS[layout]), train_rank, plan(folder, LAYOUTS[layout], self.rows))
        return folder


@pytest.fixture(scope="module")
def straight(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    return Straight(ranks, tmp_path_factory.mktemp("straight"))


HUB = "tp2-dp2"
"""Cut over both axes: what each layout saved goes on under it, and what it saved under each.

A checkpoint is the same tensors by the same names whatever saved it, so that every other pair is made of these two.
"""


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        *((name, name) for name in LAYOUTS),
        *((name, HUB) for name in LAYOUTS if name != HUB),
        *((HUB, name) for name in LAYOUTS if name != HUB),
    ],
)
def test_the_next_losses_are_those_of_the_run_that_was_saved(
    straight: Straight, tmp_path: Path, saved: str, loaded: str
) -> None:
    golden = straight.run(saved)
    checkpoint = golden / "checkpoints" / f"step-{SAVED:08d}"
    resolved = continued(tmp_path / "run", LAYOUTS[loaded], straight.rows, checkpoint)
    straight.ranks.run(world_of(LAYOUTS[loaded]), train_rank, resolved)
    found, expected = after(tmp_path / "run"), after(golden)
    assert len(found) == len(expected) == 5
    if saved == loaded:
        assert found == expected
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert {k: ours[k] for k in ("step", "lr", "tokens")} == {k: theirs[k] for k in ("step", "lr", "tokens")}
