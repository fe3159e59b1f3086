"""Learning rates by hand, and those of every step next to transformers' schedules and torch's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from nxtrain.config.schedule import ScheduleConfig, schedule_problems
from nxtrain.config.schema import RunConfig
from nxtrain.optim.schedule import Piece, Schedule
from nxtrain.optim.schedule_chart import WIDTH, draw, sampled

LR = 3e-3


def of(steps: int, **keys: Any) -> Schedule:
    """Schedule of keys that satisfy the rules."""
    optim = ScheduleConfig.model_validate({"lr": LR, "min_lr": 0.0, **keys})
    assert not list(schedule_problems(optim, steps))
    return Schedule.of_keys(optim, steps)


def ours(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.at(step) for step in range(steps + 1)]


def theirs(scheduler_of: Callable[[torch.optim.Optimizer], LRScheduler], steps: int, lr: float = LR) -> list[float]:
    """Rates after 0 to `steps` steps of a scheduler of torch or transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = scheduler_of(optimizer), []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


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
    schedule = of(480_000, lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    assert schedule.at(step) == pytest.approx(lr, rel=1e-7, abs=0)


@pytest.mark.parametrize(("step", "lr"), [(1, 0.25), (4, 1.0), (5, 1.0), (1000, 1.0)])
def test_constant_after_the_warmup(step: int, lr: float) -> None:
    assert of(20, lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=10, schedule="constant").at(step) == lr


def test_without_warmup_the_first_update_is_already_on_the_cosine() -> None:
    # Halfway along a quarter: cos(pi / 4) = 0.7071068.
    assert of(4, lr=1.0).at(1) == pytest.approx(0.5 * (1 + 0.7071068), rel=1e-7)


@pytest.mark.parametrize(("decay_steps", "reached"), [(0, 20), (7, 7), (90, 90)])
@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_floor_is_reached_with_the_run_or_where_the_configuration_says(
    decay_steps: int, reached: int, kind: str
) -> None:
    optim = {"decay_steps": decay_steps, "warmup_steps": 2, "schedule": kind}
    config = RunConfig.model_validate({"train": {"steps": 20}, "optim": optim})
    schedule = Schedule.of(config)
    assert schedule.at(reached - 1) > schedule.at(reached) == config.optim.min_lr == schedule.at(reached + 1)


def test_a_warmup_as_long_as_the_run_ends_at_the_floor() -> None:
    assert of(4, lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=4).at(4) == 0.1


@pytest.mark.parametrize("seed", range(6))
def test_every_step_has_the_rate_of_transformers(seed: int) -> None:
    from transformers import optimization as hf

    draw = random.Random(seed)
    steps = draw.randrange(20, 90)
    warmup, decay = draw.randrange(0, steps // 3), draw.randrange(1, steps // 2)
    shape, hf_shape = draw.choice([("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt")])
    ratio = draw.choice([0.0, 0.1])
    pairs: list[tuple[dict[str, Any], Callable[[torch.optim.Optimizer], LRScheduler]]] = [
        ({"schedule": "constant"}, lambda o: hf.get_constant_schedule_with_warmup(o, warmup)),
        ({"schedule": "cosine"}, lambda o: hf.get_cosine_schedule_with_warmup(o, warmup, steps)),
        (
            {"schedule": "cosine", "min_lr": ratio * LR},
            lambda o: hf.get_cosine_with_min_lr_schedule_with_warmup(o, warmup, steps, min_lr_rate=ratio),
        ),
        ({"schedule": "linear"}, lambda o: hf.get_linear_schedule_with_warmup(o, warmup, steps)),
        ({"schedule": "inverse_sqrt"}, lambda o: hf.get_inverse_sqrt_schedule(o, warmup)),
        (
            {"schedule": "wsd", "decay_steps": decay, "decay_shape": shape},
            lambda o: hf.get_wsd_schedule(o, warmup, decay, steps, decay_type=hf_shape),
        ),
    ]
    for keys, scheduler_of in pairs:
        schedule = of(steps, warmup_steps=warmup, **keys)
        assert ours(schedule, steps) == pytest.approx(theirs(scheduler_of, steps), rel=1e-12, abs=1e-18), keys


@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_torchs_schedulers_in_sequence(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randrange(1, 25) for _ in range(4)]
    low = draw.choice([0.1, 0.5]) * LR
    pieces: list[dict[str, Any]] = [
        {"steps": lengths[0], "lr": LR},
        {"steps": lengths[1], "lr": LR, "shape": "constant"},
        {"steps": lengths[2], "lr": low, "shape": "cosine"},
        {"steps": lengths[3], "lr": 0.25 * LR, "shape": "linear"},
    ]

    def in_sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
        tiny = 1e-12  # LinearLR refuses to begin at 0
        parts: list[LRScheduler] = [
            LinearLR(optimizer, tiny, 1.0, lengths[0]),
            ConstantLR(optimizer, 1.0, lengths[1]),
            CosineAnnealingLR(optimizer, lengths[2], eta_min=low),
            LinearLR(optimizer, low / LR, 0.25, lengths[3]),
        ]
        ends = [sum(lengths[: count + 1]) for count in range(3)]
        return SequentialLR(optimizer, parts, ends)

    steps = sum(lengths) + 3
    actual = ours(of(steps, schedule="pieces", pieces=pieces), steps)
    assert actual == pytest.approx(theirs(in_sequence, steps), rel=1e-9, abs=1e-14)


def test_shares_of_the_run_are_steps() -> None:
    by_steps = of(300, schedule="wsd", warmup_steps=9, decay_steps=60, decay_shape="sqrt")
    by_share = of(300, schedule="wsd", warmup_ratio=0.03, decay_ratio=0.2, decay_shape="sqrt")
    assert by_share == by_steps
    assert of(300, schedule="wsd") == of(300, schedule="wsd", decay_ratio=0.1)
    assert of(30, warmup_ratio=0.1) == of(30, warmup_steps=3)  # 0.1 * 30 is above 3


def test_a_constant_piece_begins_after_the_last_step_of_the_piece_before() -> None:
    pieces = [{"steps": 4, "lr": 1.0}, {"steps": 2, "lr": 0.5, "shape": "constant"}, {"steps": 2, "lr": 0.0}]
    result = ours(of(8, schedule="pieces", pieces=pieces), 9)
    assert result == [0.0, 0.25, 0.5, 0.75, 1.0, 0.5, 0.5, 0.25, 0.0, 0.0]


def test_inverse_sqrt_never_falls_below_the_floor() -> None:
    schedule = of(10**6, schedule="inverse_sqrt", min_lr=LR / 10, warmup_steps=100)
    assert schedule.at(400) == LR / 2
    assert schedule.at(10_000) == pytest.approx(LR / 10)
    assert schedule.at(50_000) == LR / 10


def test_rewarming_rises_from_the_checkpoint_and_joins_the_schedule() -> None:
    optim = ScheduleConfig(lr=1.0, min_lr=0.0, schedule="linear", rewarm_steps=4)
    plain, risen = Schedule.of_keys(optim, 20), Schedule.of_keys(optim, 20, rewarm_after=10)
    factors = [risen.at(step) / plain.at(step) for step in range(9, 16)]
    assert factors == pytest.approx([1, 1, 0.25, 0.5, 0.75, 1, 1])


def test_the_root_is_told_from_a_line() -> None:
    """A mutant: the decay takes the share itself in place of its root."""
    keys: dict[str, Any] = {"schedule": "wsd", "decay_steps": 8, "decay_shape": "sqrt"}
    with patch.object(math, "sqrt", lambda x: x):
        broken = ours(of(20, **keys), 20)
    assert broken != pytest.approx(ours(of(20, **keys), 20), rel=1e-3)
    assert of(20, **keys).at(14) == pytest.approx(0.5 * LR)  # a quarter of the decay, whose root is a half


def test_the_description_names_the_pieces_that_are_left() -> None:
    schedule = of(1000, schedule="wsd", warmup_steps=100, decay_steps=200, decay_shape="sqrt", min_lr=LR / 10)
    assert schedule.describe() == (
        "steps 1 to 100: up to 0.003 (linear); steps 101 to 800: 0.003; steps 801 to 1,000: down to 0.0003 (sqrt)"
    )
    assert schedule.describe(after=850) == "steps 851 to 1,000: down to 0.0003 (sqrt)"
    assert schedule.describe(after=1000) == "0.0003"
    assert of(10, schedule="constant").describe() == "from step 1: 0.003"
    assert Schedule((Piece(3, 0.0),), LR).describe() == "steps 1 to 3: down to 0 (linear)"


@pytest.mark.parametrize("steps", [1, 2, 7, WIDTH, WIDTH + 1, 480_000])
def test_the_chart_has_a_mark_in_each_column_from_the_first_step_to_the_last(steps: int) -> None:
    at = sampled(steps)
    assert (at[0], at[-1], len(at)) == (1, steps, min(WIDTH, steps))
    assert at == sorted(set(at))
    lines = draw(of(steps, schedule="linear", decay_steps=max(steps, 2)), steps).splitlines()
    assert sum(line.count("*") for line in lines) == len(at)
    assert (lines[0].split("|")[1].startswith("*") and f"{LR:.3g}"[:3] in lines[0][:10]) or steps == 1
