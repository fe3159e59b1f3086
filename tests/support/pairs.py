"""Drawn runs on pairs of answers, beside transformers or PEFT with `torch.optim` on one process.

The reference computes every answer alone, in float64, and the objectives by their formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.vocab import END_BIT, ID_MASK, IGNORE_INDEX, PROMPT_BIT
from nxtrain.config.check import Resolved
from nxtrain.config.finetune_schema import FinetuneConfig
from nxtrain.data.loader import Batch, batch_of
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import TrainState, train_step
from nxtrain.train.trainer import on_device
from tests.support.drawn import draw
from tests.support.drawn_runs import first_weights
from tests.support.layouts import ONE, Degrees
from tests.support.lora import (
    DrawnAdapters,
    adapters_of,
    draw_adapters,
    draw_quantized,
    our_name,
    restored,
    with_adapters,
)
from tests.support.models import changed
from tests.support.parity import Course, reference, start

Rows = NDArray[np.int64]

SHORTEST, LONGEST = 16, 48
"""Targets in a row of a draw."""


@dataclass(frozen=True)
class DrawnPairs(DrawnAdapters):
    """A drawn run on pairs of answers, of adapters or of every weight."""

    @property
    def resolved(self) -> Resolved:
        """The configuration; the rules of a corpus do not apply, since rows are given."""
        return changed(super().resolved, data={"doc_mask": True})

    @property
    def objective(self) -> FinetuneConfig:
        return self.resolved.config.finetune

    def rows(self) -> list[Rows]:
        """Marked ids of each step's global batch: (global_batch, S + 1)."""
        train, rng = self.resolved.config.train, Random(f"pairs/{self.lane}/{self.seed}/{self.index}")
        shape = (train.seq_len, self.resolved.model.vocab_size, self.objective.pairs_per_row)
        results = []
        for _ in range(self.steps):
            rows = [drawn_row(rng, *shape, may_be_empty=number > 0) for number in range(train.global_batch)]
            results.append(np.array(rows))
        return results

    def weights(self) -> dict[str, Tensor]:
        """Whole weights at step 0; adapters are not zero."""
        base = first_weights(self)
        return {**base, **adapters_of(self.resolved, base)} if self.objective.adapts else base


def drawn_row(rng: Random, seq_len: int, vocab_size: int, most_pairs: int, *, may_be_empty: bool) -> list[int]:
    """S + 1 marked ids of whole pairs; perhaps none."""
    row: list[int] = []
    wanted = rng.randint(0 if may_be_empty else 1, most_pairs)
    for _ in range(wanted):
        prompt = [rng.randrange(vocab_size) | PROMPT_BIT for _ in range(rng.randint(0, 3))]
        answers = [[rng.randrange(vocab_size) for _ in range(rng.randint(2, 4))] for _ in range(2)]
        pair = [token for answer in answers for token in (*prompt, *answer[:-1], answer[-1] | END_BIT)]
        if len(row) + len(pair) <= seq_len + 1:
            row += pair
    return row + [IGNORE_INDEX] * (seq_len + 1 - len(row))


def draw_pairs(
    lane: str, seed: int, index: int, degrees: Degrees = ONE, *, quantized: bool = False, **kinds: bool
) -> DrawnPairs:
    """One run of a layout; see `draw`. Even draws train adapters, above quantized weights if so, odd ones all weights.

    Drawn widths of quantized weights are those of `draw_quantized`.
    """
    attempt = index
    while not SHORTEST <= draw(lane, seed, attempt, degrees, **kinds).resolved.config.train.seq_len <= LONGEST:
        attempt += 1000
    drawn = draw_adapters(lane, seed, attempt, degrees, **kinds)
    if quantized:
        drawn = draw_quantized(lane, seed, attempt, degrees, **kinds)
    rng = Random(f"objective/{lane}/{seed}/{index}")
    finetune: dict[str, Any] = {"objective": rng.choice(("dpo", "dpo", "orpo"))}
    finetune |= {
        "beta": rng.choice((0.1, 0.5)),
        "label_smoothing": rng.choice((0.0, 0.0, 0.2)),
        "orpo_lambda": rng.choice((0.1, 1.0)),
        "pairs_per_row": rng.randint(1, 4),
    }
    if index % 2 == 0:
        finetune |= dict(drawn.finetune)
    values = {name: getattr(drawn, name) for name in ("lane", "seed", "index", "degrees", "overrides", "steps", "mask")}
    return replace(DrawnPairs(**values), finetune=tuple(finetune.items()))


# --- the reference -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """Answers of a global batch: chosen and rejected in turn, each padded to S: (A, S) ids and targets."""

    inputs: Tensor
    targets: Tensor
    reference: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        return (self.targets != IGNORE_INDEX).sum(dim=1)


def answers_alone(rows: Rows) -> Answered:
    """Answers of marked rows, each alone."""
    seq_len = rows.shape[1] - 1
    inputs, targets = [], []
    for row in rows:
        tokens = row[row != IGNORE_INDEX]
        for document in np.split(tokens, np.flatnonzero(tokens & END_BIT) + 1)[:-1]:
            rest = [IGNORE_INDEX] * (seq_len + 1 - len(document))
            inputs.append([*(document[:-1] & ID_MASK), *([0] * len(rest))])
            is_target = document[1:] & PROMPT_BIT == 0
            targets.append([*np.where(is_target, document[1:] & ID_MASK, IGNORE_INDEX), *rest])
    return Answered(torch.tensor(np.array(inputs)), torch.tensor(np.array(targets)))


def log_probs_of(model: nn.Module, answers: Answered) -> Tensor:
    """Log-probability of each answer: (A,) float64."""
    logits = model(input_ids=answers.inputs).logits.double()
    losses = F.cross_entropy(logits.transpose(1, 2), answers.targets, ignore_index=IGNORE_INDEX, reduction="none")
    return -losses.sum(dim=1)


def objective_of(config: FinetuneConfig, model: nn.Module, answers: Answered, given: Tensor | None) -> Tensor:
    """Mean of the objective over the pairs."""
    result = log_probs_of(model, answers)
    if given is None and config.objective != "orpo":
        with torch.no_grad(), model.disable_adapter():  # type: ignore[operator]
            given = log_probs_of(model, answers)
    return objective_at(config, result, answers.lengths, given)


def objective_at(config: FinetuneConfig, result: Tensor, lengths: Tensor, given: Tensor | None) -> Tensor:
    """Mean of the objective over the pairs at the log-probabilities of their answers, by the formulas of the papers."""
    if config.objective == "orpo":
        means = result / lengths
        chosen, rejected = means[::2], means[1::2]
        odds = torch.log(chosen.exp() / (1 - chosen.exp())) - torch.log(rejected.exp() / (1 - rejected.exp()))
        return (-chosen - config.orpo_lambda * torch.log(torch.sigmoid(odds))).mean()
    assert given is not None
    ratios = result - given
    margin = config.beta * (ratios[::2] - ratios[1::2])
    smoothing = config.label_smoothing
    losses = -(1 - smoothing) * torch.log(torch.sigmoid(margin)) - smoothing * torch.log(torch.sigmoid(-margin))
    return losses.mean()


def wanted_of_pairs(drawn: DrawnPairs) -> Course:
    """The course of transformers, or of PEFT with the base as reference."""
    data = [(answers_alone(rows), given) for rows, given in zip(drawn.rows(), references(drawn), strict=True)]
    return course_of_answers(drawn, lambda model, step: objective_of(drawn.objective, model, *data[step]))


def course_of_answers(
    drawn: DrawnPairs, loss_of: Callable[[nn.Module, int], Tensor], weights: Mapping[str, Tensor] | None = None
) -> Course:
    """The course of transformers or PEFT by a loss of the model and the step; None: from the weights of the draw."""
    weights = drawn.weights() if weights is None else weights
    if drawn.objective.method == "qlora":
        weights = restored(weights)

    def wrap(model: nn.Module) -> nn.Module:
        return with_adapters(drawn.resolved, weights, model) if drawn.objective.adapts else model

    course = reference(drawn.resolved, drawn.steps, weights=weights, wrap=wrap, loss_of=loss_of)
    if not drawn.objective.adapts:
        return course
    return replace(course, weights={our_name(name): tensor for name, tensor in course.weights.items()})


def references(drawn: DrawnPairs) -> Iterator[Tensor | None]:
    """Log-probabilities of the answers of each step by a reference that is given; None: the base of adapters."""
    generator = torch.Generator().manual_seed(drawn.index)
    for rows in drawn.rows():
        given = None
        if drawn.objective.stores_reference:
            lengths = answers_alone(rows).lengths
            given = (-lengths - torch.rand(len(lengths), generator=generator)).float()
        yield given


# --- ours ----------------------------------------------------------------------------------------------------------


def batch_of_pairs(
    rows: Rows, micro_batch: int, pairs_per_row: int, given: Tensor | None = None, *, labelled: bool = False
) -> Batch:
    """Batch of all rows, or of those of one rank; `given` has the reference of the answers in all of these rows."""
    batch = batch_of(rows, micro_batch, doc_mask=True, pairs_per_row=pairs_per_row, labelled=labelled)
    assert batch.answers is not None
    if given is None:
        return batch
    values = np.zeros((len(rows), 2 * pairs_per_row), np.float32)
    for row, part in zip(values, given.split(answers_in(rows)), strict=True):
        row[: len(part)] = part.numpy()
    answers = replace(batch.answers, reference=values.reshape(batch.answers.lengths.shape))
    return replace(batch, answers=answers)


def share_of(state: TrainState, rows: Rows, given: Tensor | None, micro_batch: int, pairs_per_row: int) -> DeviceBatch:
    """This rank's part of a global batch of pairs."""
    mine, own = of_rank(state, rows, given)
    return on_device(state, batch_of_pairs(mine, micro_batch, pairs_per_row, own))


def of_rank(state: TrainState, rows: Rows, given: Tensor | None) -> tuple[Rows, Tensor | None]:
    """Rows of a global batch that this rank computes, and the reference of their answers."""
    parts, rank = np.split(rows, state.mesh.dp.size), state.mesh.dp.rank
    if given is not None:
        given = given.split([sum(answers_in(part)) for part in parts])[rank]
    return parts[rank], given


def answers_in(rows: Rows) -> list[int]:
    """Answers of each row."""
    return [int((row[row != IGNORE_INDEX] & END_BIT != 0).sum()) for row in rows]


@dataclass(frozen=True)
class PairCourse(Course):
    """Course with the further values of each step's record."""

    others: tuple[dict[str, float], ...] = ()


def pairs_on_rank(backend: Backend, drawn: DrawnPairs, weights: dict[str, Tensor]) -> PairCourse:
    """The course of one rank."""
    if isinstance(backend, CpuBackend):
        backend.choose_transport(drawn.resolved.config.backend.cpu_transport)
    resolved, config = drawn.resolved, drawn.objective
    state = start(backend, resolved, weights)
    losses, norms, others = [], [], []
    for rows, given in zip(drawn.rows(), references(drawn), strict=True):
        batch = share_of(state, rows, given, resolved.config.train.micro_batch, config.pairs_per_row)
        result = train_step(state, batch, resolved.config.optim.lr)
        named = {"loss": result.loss, "norm": result.grad_norm, "pairs": result.num_tokens, **result.others}
        read = backend.fetch(named)
        losses.append(read["loss"])
        norms.append(read["norm"])
        assert state.preferences is not None
        others.append({"targets": read["targets"], **state.preferences.means(read)})
    shards = {name: p.detach().cpu() for name, p in state.data_parallel.shards.items()}
    return PairCourse(losses, norms, shards, tuple(others))


def described_pairs(drawn: DrawnPairs) -> str:
    """Layout and objective of a run, for messages."""
    return f"{drawn.degrees} {dict(drawn.finetune)}"


def counts_of(drawn: DrawnPairs) -> Sequence[int]:
    """Pairs of each step's global batch."""
    return [len(answers_alone(rows).inputs) // 2 for rows in drawn.rows()]
