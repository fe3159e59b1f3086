"""Drawn runs of KTO on labelled answers, beside transformers or PEFT with `torch.optim` on one process.

The reference computes every answer alone, in float64, and the objective by its formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.vocab import DESIRABLE_BIT, END_BIT, IGNORE_INDEX, PROMPT_BIT
from nxtrain.config.finetune_schema import FinetuneConfig
from nxtrain.data.loader import swap_answers
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import TrainState, train_step
from nxtrain.train.trainer import on_device
from tests.support.drawn_runs import norm_error
from tests.support.layouts import ONE, Degrees
from tests.support.pairs import (
    Answered,
    DrawnPairs,
    PairCourse,
    Rows,
    batch_of_pairs,
    course_of_answers,
    draw_pairs,
    log_probs_of,
    of_rank,
)
from tests.support.parity import Course, start


class Judged(NamedTuple):
    """Ids of a prompt and of an answer, and the label of the answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    is_desirable: bool

    @property
    def marked(self) -> list[int]:
        """Ids as a row holds them."""
        mark = END_BIT | DESIRABLE_BIT * self.is_desirable
        return [*(token | PROMPT_BIT for token in self.prompt), *self.answer[:-1], self.answer[-1] | mark]


JudgedRow = list[Judged]


@dataclass(frozen=True)
class DrawnLabelled(DrawnPairs):
    """A drawn run of KTO."""

    def judged(self) -> list[list[JudgedRow]]:
        """Answers of the rows of each step."""
        train, rng = self.resolved.config.train, Random(f"labelled/{self.lane}/{self.seed}/{self.index}")
        most = 2 * self.objective.pairs_per_row
        shape = (train.seq_len, self.resolved.model.vocab_size, most)
        return [
            [drawn_answers(rng, *shape, least=n == 0) for n in range(train.global_batch)] for _ in range(self.steps)
        ]

    def rows(self) -> list[Rows]:
        seq_len = self.resolved.config.train.seq_len
        return [rows_of_judged(of_step, seq_len) for of_step in self.judged()]


def drawn_answers(rng: Random, seq_len: int, vocab_size: int, most: int, *, least: int) -> JudgedRow:
    """Labelled answers that fit a row; perhaps none."""
    row: JudgedRow = []
    for _ in range(rng.randint(least, most)):
        prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, 3)))
        answer = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, 4)))
        if sum(len(other.prompt) + len(other.answer) for other in row) + len(prompt) + len(answer) <= seq_len + 1:
            row.append(Judged(prompt, answer, rng.random() < 0.5))
    return row


def rows_of_judged(judged: Sequence[JudgedRow], seq_len: int) -> Rows:
    rows = [[token for answer in row for token in answer.marked] for row in judged]
    return np.array([row + [IGNORE_INDEX] * (seq_len + 1 - len(row)) for row in rows], np.int64)


def other_answers(judged: Sequence[JudgedRow]) -> list[JudgedRow]:
    """Rows in which each prompt has the answer before; a row of one answer has none."""
    swapped: list[JudgedRow] = []
    for row in judged:
        swapped.append([])
        if len(row) > 1:
            swapped[-1] = [replaced._replace(answer=row[at - 1].answer) for at, replaced in enumerate(row)]
    return swapped


def alone(judged: Sequence[JudgedRow], seq_len: int) -> Answered:
    """Answers of rows, each alone."""
    inputs, targets = [], []
    for answer in (answer for row in judged for answer in row):
        ids = [*answer.prompt, *answer.answer]
        rest = seq_len + 1 - len(ids)
        inputs.append([*ids[:-1], *([0] * rest)])
        targets.append([*([IGNORE_INDEX] * (len(answer.prompt) - 1)), *answer.answer, *([IGNORE_INDEX] * rest)])
    shape = (-1, seq_len)
    return Answered(*(torch.tensor(ids, dtype=torch.int64).reshape(shape) for ids in (inputs, targets)))


def draw_labelled(lane: str, seed: int, index: int, degrees: Degrees = ONE, **kinds: bool) -> DrawnLabelled:
    """One run of a layout; see `draw_pairs`."""
    drawn, rng = draw_pairs(lane, seed, index, degrees, **kinds), Random(f"weights/{lane}/{seed}/{index}")
    finetune = {
        **dict(drawn.finetune),
        "objective": "kto",
        "desirable_weight": rng.choice((1.0, 1.5)),
        "undesirable_weight": rng.choice((1.0, 0.7)),
    }
    return replace(DrawnLabelled(**vars(drawn)), finetune=tuple(finetune.items()))


Given = tuple["Tensor | None", "Tensor | None"]
"""Log-probabilities by a stored reference: of the answers of a step, and of those of other prompts."""


def given_of(drawn: DrawnLabelled) -> list[Given]:
    """The stored reference of each step, which is less likely than the model mostly; None: the base of adapters."""
    if not drawn.objective.stores_reference:
        return [(None, None)] * drawn.steps
    generator = torch.Generator().manual_seed(drawn.index)
    seq_len, per_token = drawn.resolved.config.train.seq_len, float(np.log(drawn.resolved.model.vocab_size))
    given: list[Given] = []
    for judged in drawn.judged():
        lengths = [alone(rows, seq_len).lengths for rows in (judged, other_answers(judged))]
        first, second = (-per_token * n - 3 * torch.rand(len(n), generator=generator) + 0.5 for n in lengths)
        given.append((first.float(), second.float()))
    return given


def kto_of(config: FinetuneConfig, model: nn.Module, rows: list[JudgedRow], given: Given, seq_len: int) -> Tensor:
    """Mean of the objective over the answers."""
    answers, others = alone(rows, seq_len), alone(other_answers(rows), seq_len)
    of_answers, of_others = given
    divergence = 0.0
    with torch.no_grad():
        if of_answers is None:
            with model.disable_adapter():  # type: ignore[operator]
                of_answers = log_probs_of(model, answers)
                if len(others.inputs):
                    of_others = log_probs_of(model, others)
        if of_others is not None and len(others.inputs):
            divergence = max(0.0, float((log_probs_of(model, others) - of_others).mean()))
    return kto_at(config, log_probs_of(model, answers) - of_answers, rows, divergence)


def kto_at(config: FinetuneConfig, ratios: Tensor, rows: list[JudgedRow], divergence: float) -> Tensor:
    """Mean of the objective over the answers at their log-ratios, by equations 6 to 8 of the paper."""
    labels = torch.tensor([answer.is_desirable for row in rows for answer in row])
    desirable = config.desirable_weight * (1 - torch.sigmoid(config.beta * (ratios - divergence)))
    undesirable = config.undesirable_weight * (1 - torch.sigmoid(config.beta * (divergence - ratios)))
    return torch.where(labels, desirable, undesirable).mean()


def wanted_of_labelled(drawn: DrawnLabelled, weights: Mapping[str, Tensor] | None = None) -> Course:
    """The course of transformers, or of PEFT with the base as reference; None: from the weights of the draw."""
    data = list(zip(drawn.judged(), given_of(drawn), strict=True))
    seq_len = drawn.resolved.config.train.seq_len
    return course_of_answers(drawn, lambda model, step: kto_of(drawn.objective, model, *data[step], seq_len), weights)


def rounding_of_norms(drawn: DrawnLabelled, want: Course) -> float:
    """Largest change of a norm of the reference, if every weight changes by half an ulp of float32.

    Gradients of desirable and of undesirable answers may cancel.
    """
    weights = drawn.weights()
    most = 0.0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        rounded = {name: rounded_at_random(weight, generator) for name, weight in weights.items()}
        norms = wanted_of_labelled(drawn, rounded).norms
        most = max(most, *(norm_error(a, b) for a, b in zip(norms, want.norms, strict=True)))
    return most


def rounded_at_random(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Entries in float64 that differ by up to half an ulp of float32."""
    half_ulp = torch.finfo(torch.float32).eps / 2
    signs = 2 * torch.rand(weight.shape, generator=generator, dtype=torch.float64) - 1
    return weight.double() * (1 + half_ulp * signs)


def share_of_labelled(state: TrainState, drawn: DrawnLabelled, rows: Rows, given: Given) -> DeviceBatch:
    """This rank's part of a global batch of labelled answers."""
    micro, per_row = drawn.resolved.config.train.micro_batch, drawn.objective.pairs_per_row
    mine = of_rank(state, rows, given[0])
    swapped = of_rank(state, swap_answers(rows), given[1])
    batch, others = (batch_of_pairs(part, micro, per_row, own, labelled=True) for part, own in (mine, swapped))
    return on_device(state, replace(batch, swapped=others))


def labelled_on_rank(backend: Backend, drawn: DrawnLabelled, weights: dict[str, Tensor]) -> PairCourse:
    """The course of one rank."""
    if isinstance(backend, CpuBackend):
        backend.choose_transport(drawn.resolved.config.backend.cpu_transport)
    state = start(backend, drawn.resolved, weights)
    assert state.preferences is not None
    losses, norms, others = [], [], []
    for rows, given in zip(drawn.rows(), given_of(drawn), strict=True):
        batch = share_of_labelled(state, drawn, rows, given)
        result = train_step(state, batch, drawn.resolved.config.optim.lr)
        named = {"loss": result.loss, "norm": result.grad_norm, "answers": result.num_tokens, **result.others}
        read = backend.fetch(named)
        losses.append(read["loss"])
        norms.append(read["norm"])
        others.append({"targets": read["targets"], **state.preferences.means(read)})
    shards = {name: p.detach().cpu() for name, p in state.data_parallel.shards.items()}
    return PairCourse(losses, norms, shards, tuple(others))
