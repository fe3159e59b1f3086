"""The device's history of steps, exact whenever it is read, with every step that updated nothing."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from nxtrain.backends.base import fetched_names
from nxtrain.backends.c10d import AcceleratorBackend, C10dBackend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.config.operation_schema import MetricsConfig
from nxtrain.train.health.step_history import BadSteps, PastStep, StepHistory, not_finite


def fetched(history: StepHistory) -> dict[str, float]:
    numbers = [number for value in history.values().values() for number in value.reshape(-1).tolist()]
    return dict(zip(fetched_names(history.values()), numbers, strict=True))


def note(history: StepHistory, step: int, *, bad: bool) -> None:
    loss = torch.tensor(math.inf if bad else 2.0 + step)
    history.note(loss, torch.tensor(float(step)), torch.tensor(8.0))


def test_a_step_without_targets_is_told_from_a_bad_one() -> None:
    history = StepHistory(torch.clone)
    note(history, 1, bad=True)
    history.note(torch.tensor(math.nan), torch.tensor(math.nan), torch.tensor(0.0))
    bad, empty = history.take(2, 0, fetched(history))
    assert (bad.has_targets, bad.is_bad) == (True, True)
    assert (empty.has_targets, empty.is_bad) == (False, False)


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
    actual = not_finite(*map(torch.tensor, values))
    assert (actual.dtype, actual.shape, actual.item()) == (torch.bool, (), expected)
    assert PastStep(1, *values).is_bad is expected  # the host decides as the device does


@pytest.mark.parametrize("every", [1, 7, 24, 25, 240])
def test_every_step_is_read_once_at_the_next_reading(every: int) -> None:
    history, drawn = StepHistory(torch.clone), random.Random(every)
    bad = {step for step in range(1, 501) if drawn.random() < 0.2} | {1, 240, 241, 500}
    results: list[PastStep] = []
    last_read = 0
    for step in range(1, 501):
        note(history, step, bad=step in bad)
        if step % every == 0 or step == 500:
            read = fetched(history) | {"loss": 1.0}
            past = history.take(step, last_read, read)
            assert read == {"loss": 1.0}
            results += past
            last_read = step
            if among := [number for number in range(step - len(past) + 1, step + 1) if number in bad]:
                assert BadSteps.among(past) == BadSteps(tuple(among), math.inf, among[-1])
            else:
                assert BadSteps.among(past) == BadSteps()
    assert results == [PastStep(step, math.inf if step in bad else 2.0 + step, float(step)) for step in range(1, 501)]


def test_the_longest_interval_of_the_configuration_is_remembered_and_a_step_more_is_not() -> None:
    (limit,) = [rule.le for rule in MetricsConfig.model_fields["log_every"].metadata if hasattr(rule, "le")]
    history = StepHistory(torch.clone)
    for step in range(1, limit + 1):
        note(history, step, bad=step == 1)
    assert BadSteps.among(history.take(limit, 0, fetched(history))).steps == (1,)
    note(history, limit + 1, bad=False)
    past = history.take(limit + 1, 0, fetched(history))
    assert [past[0].step, len(past), BadSteps.among(past)] == [2, limit, BadSteps()]


@pytest.mark.parametrize("kind", [AcceleratorBackend, CpuBackend])
def test_a_backend_reads_entries_under_names_of_their_own(kind: type[C10dBackend]) -> None:
    values = {"loss": torch.tensor(2.5), "ring": torch.tensor([[1.0, 2.0], [3.0, math.inf]], dtype=torch.float64)}
    backend = cast("C10dBackend", SimpleNamespace(device=torch.device("cpu"), _lost=""))
    read = kind.fetch(backend, values)
    assert read == {"loss": 2.5, "ring_0": 1.0, "ring_1": 2.0, "ring_2": 3.0, "ring_3": math.inf}
    assert list(read) == fetched_names(values)
