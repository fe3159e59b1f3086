"""Learning rates by hand."""

from __future__ import annotations

import pytest

from nxtrain.config.schema import RunConfig
from nxtrain.optim.schedule import Schedule


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        (0, 0.0),
        (1, 1.5e-7),
        (1000, 1.5e-4),
        (2000, 3e-4),
        # progress 238000 / 478000 = 0.4979079; 3e-5 + 1.35e-4 * (1 + cos(pi * progress)), the cosine being 0.0065723.
        (240_000, 1.6588726e-4),
        (480_000, 3e-5),
        (500_000, 3e-5),
    ],
)
def test_llama_pretraining(step: int, lr: float) -> None:
    schedule = Schedule(lr=3e-4, min_lr=3e-5, warmup_steps=2000, decay_steps=480_000)
    assert schedule.at(step) == pytest.approx(lr, rel=1e-7, abs=0)


@pytest.mark.parametrize(("step", "lr"), [(1, 0.25), (4, 1.0), (5, 1.0), (1000, 1.0)])
def test_constant_after_the_warmup(step: int, lr: float) -> None:
    assert Schedule(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=10, kind="constant").at(step) == lr


def test_without_warmup_the_first_update_is_already_on_the_cosine() -> None:
    # Halfway along a quarter: cos(pi / 4) = 0.7071068.
    assert Schedule(lr=1.0, decay_steps=4).at(1) == pytest.approx(0.5 * (1 + 0.7071068), rel=1e-7)


@pytest.mark.parametrize(("decay_steps", "reached"), [(0, 20), (7, 7), (90, 90)])
def test_the_floor_is_reached_with_the_run_or_where_the_configuration_says(decay_steps: int, reached: int) -> None:
    optim = {"decay_steps": decay_steps, "warmup_steps": 2}
    config = RunConfig.model_validate({"train": {"steps": 20}, "optim": optim})
    assert Schedule.of(config).decay_steps == reached


def test_a_warmup_as_long_as_the_run_ends_at_the_floor() -> None:
    assert Schedule(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=4).at(4) == 0.1
