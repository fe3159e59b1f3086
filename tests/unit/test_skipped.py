"""The device tells which steps updated nothing, exactly, whenever it is asked."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nxtrain.config.schema import MetricsConfig
from nxtrain.train.health.skipped_steps import BadSteps, SkippedSteps, not_finite


def note(skipped: SkippedSteps, step: int, *, bad: bool) -> None:
    loss = torch.tensor(math.inf if bad else 2.0 + step)
    skipped.note(not_finite(loss, torch.ones(())), loss, torch.tensor(float(step)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, 2.0), False),
        ((3.4e38, 1.0), False),
        ((math.nan, 1.0), True),
        ((1.0, math.inf), True),
        ((-math.inf, 1.0), True),
    ],
)
def test_what_is_not_finite_is_seen_in_any_place(values: tuple[float, float], expected: bool) -> None:
    found = not_finite(*map(torch.tensor, values))
    assert (found.dtype, found.shape, found.item()) == (torch.bool, (), expected)


@pytest.mark.parametrize("every", [1, 7, 24, 25, 240])
def test_every_bad_step_is_told_once_at_the_next_reading(every: int) -> None:
    skipped, drawn = SkippedSteps(torch.clone), random.Random(every)
    bad = {step for step in range(1, 501) if drawn.random() < 0.2} | {1, 240, 241, 500}
    told: list[int] = []
    last_read = 0
    for step in range(1, 501):
        note(skipped, step, bad=step in bad)
        if step % every == 0 or step == 500:
            read = {name: float(value) for name, value in skipped.values().items()} | {"loss": 1.0}
            found = skipped.take(step, last_read, read)
            assert read == {"loss": 1.0}
            if found.steps:
                assert (found.loss, found.grad_norm) == (math.inf, found.steps[-1])
            told += found.steps
            last_read = step
    assert told == sorted(bad)


def test_the_longest_interval_of_the_configuration_is_remembered_and_a_step_more_is_not() -> None:
    (limit,) = [rule.le for rule in MetricsConfig.model_fields["log_every"].metadata if hasattr(rule, "le")]
    skipped = SkippedSteps(torch.clone)
    note(skipped, 1, bad=True)
    for step in range(2, limit + 1):
        note(skipped, step, bad=False)

    def taken(step: int) -> BadSteps:
        return skipped.take(step, 0, {name: float(value) for name, value in skipped.values().items()})

    assert taken(limit).steps == (1,)
    note(skipped, limit + 1, bad=False)
    assert taken(limit + 1) == BadSteps()
