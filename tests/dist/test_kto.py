"""KTO on every kind of layout: parity with transformers, PEFT and `torch.optim` on one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.train import kto, step
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.kto import Kto
from nxtrain.train.preferences import Pairs
from nxtrain.train.step import TrainState, eval_step, train_step
from tests.support.drawn import OWN_SEED, SEED, one_in
from tests.support.drawn_runs import NORM, error_of, failures
from tests.support.labelled import (
    DrawnLabelled,
    draw_labelled,
    given_of,
    labelled_on_rank,
    other_answers,
    rounding_of_norms,
    share_of_labelled,
    wanted_of_labelled,
)
from tests.support.layouts import Degrees
from tests.support.pairs import PairCourse, described_pairs
from tests.support.parity import start
from tests.support.ranks import RankPool

LAYOUTS = [
    Degrees(),
    Degrees(),
    Degrees(tp=2, dp=2, shard="zero1", sequence_parallel=True),
    Degrees(dp=3, shard="grad_op"),
    Degrees(dp=2, shard="full"),
    Degrees(pp=2, dp=2),
    Degrees(pp=2, virtual_pp=2),
    Degrees(tp=2, cp=2, cp_layout="zigzag", cp_method="ring", sequence_parallel=True),
    Degrees(pp=2, cp=2, cp_layout="striped", cp_method="gather"),
]


@pytest.mark.parametrize("index", one_in(2, range(len(LAYOUTS))), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_on_labelled_answers_of_any_layout_equals_one_process(ranks: RankPool, index: int) -> None:
    run = draw_labelled("labelled", SEED, index, LAYOUTS[index])
    courses: list[PairCourse] = ranks.run(run.degrees.world, labelled_on_rank, run, run.weights())
    want = wanted_of_labelled(run)
    error = error_of(courses, want, run)
    if error.norm > NORM:  # rounding of the weights alone may change the reference as much
        error = replace(error, norm=error.norm * NORM / max(NORM, 2 * rounding_of_norms(run, want)))
    assert error.is_parity, (failures([(run, error)]), described_pairs(run))
    for course in courses:
        assert course.others == courses[0].others
        judged = [[answer for row in rows for answer in row] for rows in run.judged()]
        assert [others["answers"] for others in course.others] == [len(answers) for answers in judged]
        desirable = [sum(answer.is_desirable for answer in answers) for answers in judged]
        assert [others["desirable"] for others in course.others] == desirable


# --- mutants -------------------------------------------------------------------------------------------------------


def _divergence_of(state: TrainState, swapped: DeviceBatch) -> Tensor:
    """Divergence over the batch of one rank."""
    with torch.no_grad():
        found = step.answer_log_probs(state, swapped), step._by_reference(state, swapped)
        total, number = Kto.divergence_sums(*found, swapped.pairs).unbind()
        return (total / number.clamp(min=1.0)).clamp(min=0.0)


def _of_each_rank() -> AbstractContextManager[Any]:
    return patch.object(step, "_divergence", _divergence_of)


def _none() -> AbstractContextManager[Any]:
    return patch.object(step, "_divergence", lambda state, swapped: swapped.pairs[0].lengths.new_zeros(()))


def _of_own_answers() -> AbstractContextManager[Any]:
    """The divergence is the mean log-ratio of the answers themselves."""
    return patch("tests.support.labelled.swap_answers", lambda rows: rows)


def _labels_exchanged() -> AbstractContextManager[Any]:
    sound = Kto.loss

    def loss(self: Kto, losses: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        assert pairs.labels is not None
        return sound(self, losses, replace(pairs, labels=1 - pairs.labels))

    return patch.object(Kto, "loss", loss)


def _with_a_gradient() -> AbstractContextManager[Any]:
    """The divergence of a micro-batch moves with its own answers."""
    sound = Kto.loss

    def loss(self: Kto, losses: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        assert pairs.divergence is not None
        found = self.log_probs(losses, pairs).mean()
        return sound(self, losses, replace(pairs, divergence=pairs.divergence + found - found.detach()))

    return patch.object(Kto, "loss", loss)


MUTANTS: dict[str, tuple[Degrees, Callable[[], AbstractContextManager[Any]]]] = {
    "KL of each rank": (Degrees(dp=2), _of_each_rank),
    "no KL": (Degrees(), _none),
    "KL of the answers themselves": (Degrees(), _of_own_answers),
    "labels exchanged": (Degrees(), _labels_exchanged),
    "KL with a gradient": (Degrees(), _with_a_gradient),
}


def run_of(degrees: Degrees) -> DrawnLabelled:
    """A run beside a stored reference, from which the model diverges, with several answers in each half."""
    for index in range(1, 1000, 2):
        run = draw_labelled("mutants", OWN_SEED, index, degrees)
        halves = [others[len(others) // 2 :] for others in map(other_answers, run.judged())]
        if all(map(any, halves)) and run.degrees.world * run.steps < 7:
            return run
    raise AssertionError(f"no draw on {degrees}")


def mutated(backend: Backend, name: str, run: DrawnLabelled) -> PairCourse:
    """The course of one rank with a defect; an empty name has none."""
    mutant: Callable[[], AbstractContextManager[Any]] = nullcontext
    if name:
        mutant = MUTANTS[name][1]
    with mutant():
        return labelled_on_rank(backend, run, run.weights())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_of_the_objective_is_seen(ranks: RankPool, name: str) -> None:
    run = run_of(MUTANTS[name][0])
    want = wanted_of_labelled(run)
    sound, defective = (ranks.run(run.degrees.world, mutated, given, run) for given in ("", name))
    assert all(others["kl"] > 0.05 for others in sound[0].others), sound[0].others
    assert error_of(sound, want, run).is_parity, described_pairs(run)
    assert not error_of(defective, want, run).is_parity, described_pairs(run)


# --- evaluation ----------------------------------------------------------------------------------------------------


def sums_of_a_step(backend: Backend, run: DrawnLabelled) -> tuple[list[float], list[float]]:
    """Sums that an evaluation finds, and those of the step that follows."""
    state = start(backend, run.resolved, run.weights())
    batch = share_of_labelled(state, run, run.rows()[0], given_of(run)[0])
    sums = [float(sum(values)) for values in zip(*eval_step(state, batch), strict=True)]
    found = train_step(state, batch, 1e-3)
    trained = [float(found.loss * found.num_tokens), float(found.num_tokens), *map(float, found.others.values())]
    return sums, trained


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pp=2, dp=2), Degrees(cp=2, cp_layout="zigzag")], ids=str)
def test_an_evaluation_of_labelled_answers_has_the_numbers_of_the_step(ranks: RankPool, degrees: Degrees) -> None:
    run = draw_labelled("evaluation", SEED, 1, degrees)
    for evaluated, trained in ranks.run(degrees.world, sums_of_a_step, run):
        assert evaluated == pytest.approx(trained, rel=1e-6, abs=1e-6)


def test_a_batch_without_a_kind_of_answers_has_no_reward_of_the_kind() -> None:
    """A mean over no answers would be no number."""
    read = dict.fromkeys(kto.Kto.sums[1:], 0.0) | {"answers": 4.0, "desirable": 4.0, "reward_chosen": 2.0}
    means = Kto.means(object.__new__(Kto), read)
    assert means["reward_chosen"] == 0.5
    assert "reward_rejected" not in means and "reward_margin" not in means
