"""Length of a run: steps or epochs, never both, and enough steps for every row."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.check import resolve_config
from nxtrain.config.duration import with_epochs_as_steps
from nxtrain.config.load import load
from nxtrain.config.schema import RunConfig
from nxtrain.config.show import dump


def problems(folder: Path, text: str, *overrides: str) -> list[Problem]:
    (folder / "run.toml").write_text(text)
    try:
        resolve_config(load(folder / "run.toml", overrides), None)
    except ConfigError as error:
        return [*error.problems]
    return []


@given(
    epochs=st.one_of(st.integers(1, 50).map(float), st.sampled_from([0.25, 0.5, 1.5])),
    num_rows=st.integers(1, 10**6),
    global_batch=st.integers(1, 4096),
)
def test_steps_are_the_fewest_that_see_every_row_so_often(epochs: float, num_rows: int, global_batch: int) -> None:
    config = RunConfig.model_validate(
        {"train": {"epochs": epochs, "global_batch": global_batch}, "optim": {"warmup_steps": 0}}
    )
    counted = with_epochs_as_steps(config, num_rows)
    steps = counted.train.steps
    assert steps * global_batch >= epochs * num_rows > (steps - 1) * global_batch
    assert counted.train.epochs == 0
    assert counted.model_copy(update={"train": config.train}) == config


@pytest.mark.parametrize(
    ("text", "overrides", "is_refused"),
    [
        ("[train]\nepochs = 2.0", [], False),
        ("[train]\nepochs = 2.0\nsteps = 5", [], True),
        ("[train]\nsteps = 5", ["train.epochs=2"], False),
        ("", ["train.epochs=2", "train.steps=5"], True),
        ("[train]\nepochs = 2.0", ["train.steps=5"], True),
        ("[train]\nepochs = 2.0", ["train.steps=5", "train.epochs=0"], False),
    ],
)
def test_steps_and_epochs_exclude_each_other(tmp_path: Path, text: str, overrides: list[str], is_refused: bool) -> None:
    result = problems(tmp_path, text, *overrides)
    assert [problem.key for problem in result] == (["train.epochs"] if is_refused else [])
    assert all("train.steps=5" in problem.reason for problem in result)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.source=arrow", "data.path=docs.arrow"],
        ["data.source=tokens", "data.mixture=['a.npy', 'b.npy']"],
    ],
)
def test_sources_without_an_end_have_no_epochs(tmp_path: Path, overrides: list[str]) -> None:
    (result,) = problems(tmp_path, "", "train.epochs=1", *overrides)
    assert (result.key, "are endless" in result.reason) == ("train.epochs", True)


def test_a_warmup_longer_than_the_epochs_is_refused_once_the_steps_are_known(tmp_path: Path) -> None:
    assert not problems(tmp_path, "", "train.epochs=1", "optim.warmup_steps=5000")
    config = load(tmp_path / "run.toml", ["train.epochs=1", "train.global_batch=8", "optim.warmup_steps=11"]).config
    assert with_epochs_as_steps(config, 88).train.steps == 11
    with pytest.raises(ConfigError, match=r"11 exceeds train\.steps=10"):
        with_epochs_as_steps(config, 80)


def test_the_warmup_ends_before_the_schedule(tmp_path: Path) -> None:
    overrides = ("train.steps=10", "optim.warmup_steps=11")
    assert [p.reason for p in problems(tmp_path, "", *overrides)] == ["11 exceeds train.steps=10"]
    result = problems(tmp_path, "", *overrides, "optim.decay_steps=10")
    assert [p.reason for p in result] == ["11 exceeds optim.decay_steps=10"]
    assert not problems(tmp_path, "", *overrides, "optim.decay_steps=11")


def test_min_lr_bounds_a_cosine_only(tmp_path: Path) -> None:
    assert [p.reason for p in problems(tmp_path, "", "optim.lr=1e-5")] == ["min_lr=3e-05 exceeds lr=1e-05"]
    assert not problems(tmp_path, "", "optim.lr=1e-5", "optim.schedule=constant")


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["optim.warmup_ratio=0.1", "optim.warmup_steps=2"], "optim.warmup_ratio", "0.1 of the run and"),
        (["optim.schedule=wsd", "optim.decay_ratio=0.1", "optim.decay_steps=2"], "optim.decay_ratio", "two lengths"),
        (["optim.decay_ratio=0.1"], "optim.decay_ratio", "for schedule=wsd only, but schedule=cosine"),
        (
            ["optim.schedule=wsd", "optim.warmup_steps=6", "optim.decay_steps=5"],
            "optim.decay_steps",
            "6 and a decay of",
        ),
        (["optim.schedule=wsd", "optim.decay_steps=11"], "optim.decay_steps", "11 steps exceeds train.steps=10"),
        (["optim.schedule=linear", "optim.lr=1e-5"], "optim.min_lr", "exceeds lr"),
        (["optim.schedule=pieces"], "optim.pieces", "has no pieces"),
        (["optim.pieces=[{steps = 3, lr = 1.0}]"], "optim.pieces", "no effect with schedule=cosine"),
        (
            ["optim.schedule=pieces", "optim.pieces=[{steps = 3, lr = 1.0}]", "optim.warmup_steps=1"],
            "optim.warmup_steps",
            "the whole schedule",
        ),
        (["optim.pieces=[{steps = 3, rl = 1.0}]"], "optim.pieces.lr", "missing"),
        (["optim.pieces=[{steps = 3, lr = 1.0, shape = 'sine'}]"], "optim.pieces.shape", "not one of linear, cosine"),
    ],
)
def test_keys_of_the_schedule_that_contradict_each_other(
    tmp_path: Path, overrides: list[str], key: str, reason: str
) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 10")
    with pytest.raises(ConfigError) as refused:
        resolve_config(load(tmp_path / "run.toml", overrides), None)
    first = refused.value.problems[0]
    assert first.key == key and reason in first.reason


def test_pieces_come_back_from_the_written_configuration(tmp_path: Path) -> None:
    text = '[optim]\nschedule = "pieces"\n[[optim.pieces]]\nsteps = 3\nlr = 1e-3\n[[optim.pieces]]\nsteps = 2\nlr = 0\n'
    (tmp_path / "run.toml").write_text(text)
    config = load(tmp_path / "run.toml").config
    (tmp_path / "again.toml").write_text(dump(config))
    assert load(tmp_path / "again.toml").config == config
    assert [piece.steps for piece in config.optim.pieces] == [3, 2]
