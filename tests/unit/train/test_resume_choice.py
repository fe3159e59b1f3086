"""Which checkpoint a start goes on from: told to, told another, and started again by an agent after either."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.checkpoint import layout
from nxtrain.config.schema import RunConfig
from nxtrain.mesh import Mesh
from nxtrain.train.resume import Resumption
from nxtrain.train.start import is_restart
from tests.support.checkpoints import meta


def make(path: Path, step: int) -> Path:
    path.mkdir(parents=True)
    (path / layout.META).write_text(meta(step).sealed())
    return path


def chosen(run: Path, resume: str, *, restarted: bool) -> tuple[Path | None, bool]:
    """What a start takes, and whether it is its own; it then puts aside what it goes back from."""
    config = RunConfig.model_validate({"run": {"dir": run}, "checkpoint": {"resume": resume}})
    resumption = Resumption(config, None, Mesh(1, 0), None, print, restarted=restarted)
    found = resumption.choose()
    place = found.place if found else None
    assert place is None or isinstance(place, Path)
    resumption.abandon(layout.step_of(place) if place else 0)
    return place, resumption.own


def steps(run: Path) -> list[int]:
    return [layout.step_of(path) for path in layout.list_checkpoints(run / layout.FOLDER)]


@pytest.mark.parametrize("resume", ["auto", "never", "path"])
def test_a_restart_goes_on_from_what_the_run_has_reached(tmp_path: Path, resume: str) -> None:
    run = tmp_path / "run"
    other = make(layout.step_path(tmp_path / "other", 500), 500)
    told = str(other) if resume == "path" else resume
    first = {"auto": None, "never": None, "path": other}[resume]
    assert chosen(run, told, restarted=False)[0] == first
    assert chosen(run, told, restarted=True)[0] == first, "it has reached nothing yet"
    newest = make(layout.step_path(run / layout.FOLDER, 600), 600)
    assert chosen(run, told, restarted=True) == (newest, True)
    assert steps(run) == [600]


def test_a_run_that_goes_back_leaves_nothing_that_would_be_taken_for_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (300, 500, 800, 900):
        make(layout.step_path(run / layout.FOLDER, step), step)
    back = layout.step_path(run / layout.FOLDER, 500)
    assert chosen(run, str(back), restarted=False) == (back, False)
    assert steps(run) == [300, 500]
    make(layout.step_path(run / layout.FOLDER, 600), 600)
    assert chosen(run, "auto", restarted=False) == (layout.step_path(run / layout.FOLDER, 600), True)


def test_older_checkpoints_of_the_folder_are_no_progress_of_a_run_that_came_from_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make(layout.step_path(run / layout.FOLDER, 300), 300)
    other = make(layout.step_path(tmp_path / "other", 500), 500)
    assert chosen(run, str(other), restarted=True) == (other, False)


def test_what_it_came_from_may_have_made_room(tmp_path: Path) -> None:
    run = tmp_path / "run"
    newest = make(layout.step_path(run / layout.FOLDER, 600), 600)
    gone = layout.step_path(run / layout.FOLDER, 500)
    assert chosen(run, str(gone), restarted=True) == (newest, True)


def test_agents_and_schedulers_tell_that_they_start_again() -> None:
    assert not is_restart({})
    assert not is_restart({"TORCHELASTIC_RESTART_COUNT": "0"})
    assert is_restart({"TORCHELASTIC_RESTART_COUNT": "2"})
    assert is_restart({"SLURM_RESTART_COUNT": "1"})
