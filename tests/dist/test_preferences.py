"""DPO and ORPO on every kind of layout: parity with transformers, PEFT and `torch.optim` on one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import geometric_mean
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.common.vocab import END_BIT, PROMPT_BIT
from nxtrain.config.check import Resolved
from nxtrain.data import loader
from nxtrain.data.arrow.pairs import PairSamples
from nxtrain.data.arrow.preparation import Watcher, prepare_corpus
from nxtrain.data.arrow.preparation_request import PreparationRequest
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.train import preferences, reference, step
from nxtrain.train.context import RunContext
from nxtrain.train.preferences import Pairs, Preferences
from nxtrain.train.reference import LogProbs
from nxtrain.train.step import eval_step, train_step
from tests.support.conversations import VOCABULARY
from tests.support.corpora import write_tokenizer
from tests.support.drawn import OWN_SEED, SEED, one_in
from tests.support.drawn_fp16 import WORSE, root_mean_square
from tests.support.drawn_runs import check_drawn, error_of, failures
from tests.support.labelled import DrawnLabelled, labelled_on_rank, wanted_of_labelled
from tests.support.layouts import Degrees, covering_array
from tests.support.models import changed, weights_of
from tests.support.narrow_pairs import OnRank, both_references, distances, of_all, on_rank, step_of_torch
from tests.support.pairs import (
    DrawnPairs,
    PairCourse,
    answers_in,
    counts_of,
    described_pairs,
    draw_pairs,
    pairs_on_rank,
    references,
    share_of,
    wanted_of_pairs,
)
from tests.support.parity import layout, start
from tests.support.ranks import RankPool

_SMALL = [degrees for degrees in covering_array(SEED, 64) if degrees.world <= 4]
_CONTEXT = [degrees for degrees in covering_array(SEED, 48, cp=True) if degrees.world <= 4]
LAYOUTS = [
    *[degrees for degrees in _SMALL if degrees.tp > 1 and not degrees.sequence_parallel][:4],
    *[degrees for degrees in _SMALL if degrees.sequence_parallel][:3],
    *[degrees for degrees in _SMALL if degrees.pp > 1 and degrees.virtual_pp > 1][:2],
    *[degrees for degrees in _SMALL if degrees.schedule == "zero_bubble"][:2],
    Degrees(tp=2, dp=2, shard="zero1", sequence_parallel=True),
    Degrees(dp=3, shard="zero1"),
    Degrees(dp=3, shard="grad_op"),
    Degrees(dp=2, shard="full"),
    Degrees(pp=2, dp=2, shard="full"),
    Degrees(dp=4, shard="hybrid"),
    *_CONTEXT[:4],
    Degrees(tp=2, cp=2, cp_layout="zigzag", cp_method="ring", sequence_parallel=True),
    Degrees(pp=2, cp=2, cp_layout="striped", cp_method="gather"),
]


SLOW = {1, 3, 5, 7, 9, 11, 12, 15, 16, 19, 20}


@pytest.mark.parametrize(
    "index",
    [pytest.param(index, marks=[pytest.mark.slow] * (index in SLOW)) for index in range(len(LAYOUTS))],
    ids=lambda index: f"{index}-{LAYOUTS[index]}",
)
def test_a_drawn_run_on_pairs_of_any_layout_equals_one_process(ranks: RankPool, index: int) -> None:
    run = draw_pairs("pairs", SEED, index, LAYOUTS[index])
    courses: list[PairCourse] = ranks.run(run.degrees.world, pairs_on_rank, run, run.weights())
    check_drawn(courses, wanted_of_pairs(run), run, described_pairs(run))
    for course in courses:
        assert [others["pairs"] for others in course.others] == counts_of(run)
        assert course.others == courses[0].others


QUANTIZED = [
    ("dpo", Degrees(tp=2, dp=2, shard="zero1", sequence_parallel=True)),
    ("kto", Degrees(dp=2, shard="full")),
    ("orpo", Degrees(pp=2)),
    ("dpo", Degrees()),
    ("kto", Degrees(tp=2, pp=2)),
    ("orpo", Degrees(dp=2, shard="grad_op")),
]


@pytest.mark.parametrize(
    "index", one_in(3, range(len(QUANTIZED))), ids=lambda index: "-".join(map(str, QUANTIZED[index]))
)
def test_objectives_above_quantized_weights_equal_peft_above_restored_ones(ranks: RankPool, index: int) -> None:
    objective, degrees = QUANTIZED[index]
    drawn = draw_pairs("quantized pairs", SEED, 2 * index, degrees, quantized=True)
    run = replace(drawn, finetune=(*drawn.finetune, ("objective", objective)))
    if objective == "kto":
        labelled = DrawnLabelled(**vars(run))
        courses = ranks.run(degrees.world, labelled_on_rank, labelled, run.weights())
        errors = [(run, error_of(courses, wanted_of_labelled(labelled), run))]
    else:
        courses = ranks.run(degrees.world, pairs_on_rank, run, run.weights())
        errors = [(run, error_of(courses, wanted_of_pairs(run), run))]
    assert not failures(errors), (failures(errors), described_pairs(run))


# --- bf16 ----------------------------------------------------------------------------------------------------------

OBJECTIVES = ("dpo", "orpo", "kto")
FEWEST = 4
"""Answers of a first step; of fewer, chance decides which rounding is the smaller."""

IN_BF16 = [Degrees(), Degrees(tp=2, sequence_parallel=True), Degrees(pp=2), Degrees(dp=2, shard="full")]


def draw_narrow(objective: str, index: int, degrees: Degrees, *, method: str) -> DrawnPairs:
    """One run of an objective in bf16, whose first step has answers."""
    while True:
        run = draw_pairs("narrow", SEED, index, degrees, quantized=method == "qlora", bf16=True)
        run = replace(run, finetune=(*run.finetune, ("objective", objective), ("method", method)))
        if objective == "kto":
            run = DrawnLabelled(**vars(run))
        if sum(answers_in(run.rows()[0])) >= FEWEST:
            return run
        index += 2000


@pytest.mark.parametrize("number", [3, pytest.param(24, marks=pytest.mark.slow)])
def test_answers_and_gradients_in_bf16_are_as_exact_as_those_of_transformers(ranks: RankPool, number: int) -> None:
    """Over all runs, as a mean of ratios: a run of a badly conditioned model has errors far above those of others."""
    of_answers: list[list[float]] = [[], []]
    for objective in OBJECTIVES:
        ratios = []
        for index in range(number):
            method = ("lora", "full", "qlora")[index % 3]
            run = draw_narrow(objective, 2 * index + (method == "full"), IN_BF16[index % len(IN_BF16)], method=method)
            exact = step_of_torch(run, torch.float64)
            ours = of_all(ranks.run(run.degrees.world, on_rank, run), run)
            own, other = (distances(narrow, exact, run) for narrow in (ours, step_of_torch(run, torch.bfloat16)))
            of_answers[0] += own[0]
            of_answers[1] += other[0]
            ratios.append(own[1] / other[1])
        assert geometric_mean(ratios) <= WORSE, objective
    mine, theirs = map(root_mean_square, of_answers)
    assert mine <= WORSE * theirs


def rounded_on_rank(backend: Backend, run: DrawnPairs) -> OnRank:
    """First step of a rank that adds up the tokens of an answer in the type of the model."""
    sound = Preferences.log_probs
    with patch.object(Preferences, "log_probs", lambda *args: sound(*args).bfloat16().float()):
        return on_rank(backend, run)


def test_answers_that_are_summed_in_bf16_are_seen(ranks: RankPool) -> None:
    run = draw_narrow("dpo", 1, Degrees(), method="full")
    exact = step_of_torch(run, torch.float64)
    steps = (of_all(ranks.run(1, rounded_on_rank, run), run), step_of_torch(run, torch.bfloat16))
    rounded, theirs = (root_mean_square(distances(narrow, exact, run)[0]) for narrow in steps)
    assert rounded > WORSE * theirs


COPIES = [
    ("lora", Degrees(tp=2, sequence_parallel=True)),
    ("qlora", Degrees()),
    ("lora", Degrees(pp=2)),
    ("qlora", Degrees(dp=2, shard="full")),
]


@pytest.mark.parametrize("index", one_in(2, range(len(COPIES))), ids=lambda index: "-".join(map(str, COPIES[index])))
@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_the_frozen_base_is_the_reference_that_a_second_copy_is(ranks: RankPool, index: int, params: str) -> None:
    method, degrees = COPIES[index]
    is_narrow = params == "bf16"
    run = draw_pairs("copies", SEED, 2 * index, degrees, quantized=method == "qlora", bf16=is_narrow)
    run = replace(run, finetune=(*run.finetune, ("objective", "dpo"), ("method", method)))
    for by_base, by_copy in ranks.run(degrees.world, both_references, run):
        assert (by_base.loss, by_base.norm) == (by_copy.loss, by_copy.norm)
        assert all(torch.equal(by_base.shards[name], grad) for name, grad in by_copy.shards.items())


# --- mutants -------------------------------------------------------------------------------------------------------


def _prompts_counted() -> AbstractContextManager[Any]:
    """Targets of prompts count as those of answers."""
    sound = loader.batch_of

    def batch_of(rows: Any, *args: Any, **kwargs: Any) -> Any:
        return sound(np.where(rows >= 0, rows & ~PROMPT_BIT, rows), *args, **kwargs)

    return patch("tests.support.pairs.batch_of", batch_of)


def _pairs_split_over_ranks() -> AbstractContextManager[Any]:
    """A row begins with the rejected answer of a pair, whose chosen answer another rank has."""
    sound = Preferences.log_probs

    def log_probs(self: Preferences, losses: Tensor, pairs: Pairs) -> Tensor:
        return sound(self, losses, replace(pairs, numbers=pairs.numbers + 1))

    return patch.object(Preferences, "log_probs", log_probs)


def _reference_that_learns() -> AbstractContextManager[Any]:
    """The gradient of the reference is not stopped."""
    sound = Preferences._dpo

    def dpo(self: Preferences, result: Tensor, pairs: Pairs) -> Any:
        assert pairs.reference is not None
        return sound(self, result, replace(pairs, reference=pairs.reference + result - result.detach()))

    return patch.object(Preferences, "_dpo", dpo)


@contextmanager
def _adapters_on(model: nn.Module) -> Iterator[None]:
    yield


def _reference_with_adapters() -> AbstractContextManager[Any]:
    return patch.object(step, "without_adapters", _adapters_on)


def _mean_of_means() -> AbstractContextManager[Any]:
    """The mean over micro-batches and ranks of the mean over the pairs of each."""
    sound = Preferences.loss

    def loss(self: Preferences, losses: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        total, sums = sound(self, losses, pairs)
        number = sums[1].clamp(min=1)
        return total / number, sums / number

    return patch.object(Preferences, "loss", loss)


def _positions_of_one_rank() -> AbstractContextManager[Any]:
    """An answer is the part of it that a context parallel rank has."""
    return patch.object(preferences, "sum_over", lambda x, comm, axis: x)


def _pairs_of_every_rank() -> AbstractContextManager[Any]:
    """Each context parallel rank counts the pairs of the row that it shares."""
    sound = Preferences.loss

    def loss(self: Preferences, losses: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        self._share = None
        return sound(self, losses, pairs)

    return patch.object(Preferences, "loss", loss)


MUTANTS: dict[str, tuple[str, Degrees, Callable[[], AbstractContextManager[Any]]]] = {
    "prompts counted": ("orpo", Degrees(), _prompts_counted),
    "pairs split over ranks": ("dpo", Degrees(), _pairs_split_over_ranks),
    "reference that learns": ("dpo", Degrees(), _reference_that_learns),
    "reference with adapters": ("dpo", Degrees(), _reference_with_adapters),
    "mean of means": ("dpo", Degrees(dp=2), _mean_of_means),
    "positions of one rank": ("dpo", Degrees(cp=2, cp_layout="contiguous", cp_method="gather"), _positions_of_one_rank),
    "pairs of every rank": ("dpo", Degrees(cp=2, cp_layout="contiguous", cp_method="gather"), _pairs_of_every_rank),
}
"""Objective and layout of a run, and the defect. Prompts that both answers share cancel out of DPO, not of ORPO."""


def run_of(objective: str, degrees: Degrees) -> DrawnPairs:
    """A run of adapters of which each step has several pairs, and another number of them on each rank.

    Of some draws a defect changes nothing, so all seeds have the same run.
    """
    for index in range(0, 1000, 2):
        run = draw_pairs("mutants", OWN_SEED, index, degrees)
        if run.objective.objective == objective and min(counts_of(run)) > 2 and run.degrees.world * run.steps < 7:
            of_ranks = [[(part & END_BIT).clip(0).sum() for part in np.split(rows, degrees.dp)] for rows in run.rows()]
            if degrees.dp == 1 or all(one != other for one, other in of_ranks):
                return run
    raise AssertionError(f"no draw of {objective} on {degrees}")


def mutated(backend: Backend, name: str, run: DrawnPairs) -> PairCourse:
    """The course of one rank with a defect; an empty name has none."""
    mutant: Callable[[], AbstractContextManager[Any]] = nullcontext
    if name:
        mutant = MUTANTS[name][2]
    with mutant():
        return pairs_on_rank(backend, run, run.weights())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_of_the_objective_is_seen(ranks: RankPool, name: str) -> None:
    objective, degrees, _ = MUTANTS[name]
    run = run_of(objective, degrees)
    want = wanted_of_pairs(run)
    sound, defective = (ranks.run(run.degrees.world, mutated, given, run) for given in ("", name))
    assert error_of(sound, want, run).is_parity, described_pairs(run)
    assert not error_of(defective, want, run).is_parity, described_pairs(run)


# --- evaluation ----------------------------------------------------------------------------------------------------


def sums_of_a_step(backend: Backend, run: DrawnPairs) -> tuple[list[float], list[float]]:
    """Loss and other means that an evaluation finds, and those of the step that follows."""
    state = start(backend, run.resolved, run.weights())
    train = run.resolved.config.train
    rows, given = run.rows()[0], next(iter(references(run)))
    batch = share_of(state, rows, given, train.micro_batch, run.objective.pairs_per_row)
    sums = [float(sum(values)) for values in zip(*eval_step(state, batch), strict=True)]
    result = train_step(state, batch, 1e-3)
    trained = [float(result.loss * result.num_tokens), float(result.num_tokens), *map(float, result.others.values())]
    return sums, trained


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pp=2, dp=2), Degrees(cp=2, cp_layout="zigzag")], ids=str)
@pytest.mark.parametrize("index", [0, 1])
def test_an_evaluation_of_pairs_has_the_numbers_of_the_step(ranks: RankPool, degrees: Degrees, index: int) -> None:
    run = draw_pairs("evaluation", SEED, index, degrees)
    for evaluated, trained in ranks.run(degrees.world, sums_of_a_step, run):
        assert evaluated == pytest.approx(trained, rel=1e-6, abs=1e-6)


# --- stored references ---------------------------------------------------------------------------------------------


def stored_reference(backend: Backend, resolved: Resolved, weights: dict[str, Tensor], corpus: Path) -> LogProbs:
    """Log-probabilities of all answers of a corpus, as a rank computes and gathers them."""
    context = RunContext.open(backend, resolved)
    train, config = resolved.config.train, resolved.config.finetune
    samples = PairSamples(
        PreparedCorpus(corpus),
        seq_len=train.seq_len,
        vocab_size=resolved.model.vocab_size,
        pairs_per_row=config.pairs_per_row,
    )
    return reference._compute(context, start(backend, resolved, weights), samples)


STORED: dict[str, dict[str, Any]] = {
    "pp2-dp2": {"pp": 2, "dp": 2},
    "tp2-cp2-sp": {"tp": 2, "cp": 2, "sp": True},
    "dp3-full": {"dp": 3, "shard": "full"},
}


@pytest.mark.parametrize("name", STORED)
def test_ranks_compute_the_reference_that_one_computes(ranks: RankPool, name: str, tmp_path: Path) -> None:
    """Rows that the global batch does not divide, and pairs that no row holds."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", VOCABULARY)
    rng, lines = Random(3), []
    for number in range(11):
        words = 60 if number == 5 else rng.randint(0, 9)
        answers = {side: f" {side} {number}" + " snow" * words for side in ("chosen", "rejected")}
        lines.append(json.dumps({"prompt": "and" * rng.randint(0, 3), **answers}) + "\n")
    (tmp_path / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")
    request = PreparationRequest([tmp_path / "pairs.jsonl"], tmp_path / "out.arrow", tokenizer=tokenizer, pairs=True)
    prepare_corpus(request, Watcher())
    results = []
    alone_and_shared: list[dict[str, Any]] = [{}, STORED[name]]
    for degrees in alone_and_shared:
        sizes: dict[str, Any] = {"tp": 1, "micro": 1, "batch": 6, "seq_len": 60, **degrees}
        plan = layout("gqa2", **sizes, config={"vocab_size": VOCABULARY})
        plan = changed(plan, finetune={"objective": "dpo", "pairs_per_row": 2}, data={"doc_mask": True})
        world = plan.config.parallel.ranks_per_replica * plan.config.parallel.dp
        weights = weights_of(plan)
        results.append(ranks.run(max(1, world), stored_reference, plan, weights, tmp_path / "out.arrow"))
    ((alone,),), of_ranks = results
    is_there = np.isfinite(alone)
    assert 10 < is_there.sum() < len(alone) == 22
    for (rank,) in of_ranks:
        np.testing.assert_allclose(rank, alone, rtol=5e-7)  # some ulp of a sum of twenty numbers
