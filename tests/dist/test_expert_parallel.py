"""Experts on some ranks only: losses, norms and weights of any layout next to plain experts on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from random import Random
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Pending, RowCounts
from nxtrain.common.kernels import Grouping
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import Layout
from nxtrain.config.check import Resolved
from nxtrain.train.step import train_step
from tests.support.drawn import SEED, Drawn, draw, one_in
from tests.support.drawn_runs import error_of, failures, first_weights, ours, wanted
from tests.support.experts import Experts, expert_reference, expert_weights, with_experts
from tests.support.layouts import covering_array
from tests.support.models import weights_of
from tests.support.parity import Course, batches, check_course, course_of, layout, local_batch, run_ours, start
from tests.support.ranks import RankPool

STEPS = 2
SHARDS = ("none", "zero1", "grad_op", "full", "hybrid")


def draw_layout(index: int) -> dict[str, Any]:
    """Degrees of up to eight ranks with ep > 1; every way to shard comes in turn."""
    rng = Random(f"experts/{SEED}/{index}")
    while True:
        tp, pp, dp, cp = rng.choice((1, 1, 2)), rng.choice((1, 1, 2)), rng.choice((1, 2, 3, 4)), rng.choice((1, 1, 2))
        ep = rng.choice([n for n in (1, 2, 3, 4, 6, 8) if dp * cp % n == 0])
        if ep > 1 and tp * pp * dp * cp <= 8:
            break
    how: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "shard": SHARDS[index % len(SHARDS)]}
    if how["shard"] == "hybrid":
        how["shard_size"] = rng.choice(
            [n for n in range(1, dp * cp + 1) if dp * cp % n == 0 and (n == 1 or n % ep == 0)]
        )
    how["sp"] = tp > 1 and rng.random() < 0.5
    how["batch"], how["micro"] = dp * rng.choice((1, 2, 3)), 1
    how["remat"] = rng.choice(("none", "full"))
    return how


def resolve(how: Mapping[str, Any]) -> Resolved:
    """A run with experts, whose inner width no tp divides."""
    num_experts = how["ep"] * (1 + len(how["shard"]) % 2)
    return with_experts(layout("odd", **how), num_experts, inner=5)


def train(backend: Backend, resolved: Resolved, weights: dict[str, Tensor]) -> Course:
    return run_ours(backend, resolved, STEPS, weights)


SOFT = [draw_layout(index) for index in range(20)]


@pytest.mark.parametrize("how", one_in(4, SOFT), ids=lambda how: "-".join(f"{k}{v}" for k, v in how.items()))
def test_experts_of_any_layout_equal_plain_experts(ranks: RankPool, how: dict[str, Any]) -> None:
    resolved = resolve(how)
    weights = expert_weights(resolved)
    data = [(rows[:, :-1], rows[:, 1:]) for rows in batches(resolved, STEPS)]
    courses = ranks.run(how["tp"] * how["pp"] * how["dp"] * how["cp"], train, resolved, weights)
    check_course(courses, expert_reference(resolved, STEPS, data, weights), resolved)


LAYOUTS = covering_array(SEED, 48, ep=True)


@pytest.mark.parametrize("index", one_in(6, range(len(LAYOUTS))), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_with_divided_experts_equals_transformers(ranks: RankPool, index: int) -> None:
    run = draw("ep-mixtures", SEED, index, LAYOUTS[index])
    courses = ranks.run(run.degrees.world, ours, run, first_weights(run))
    errors = [(run, error_of(courses, wanted(run), run))]
    assert not failures(errors), failures(errors)


def in_multiples(backend: Backend, run: Drawn, weights: dict[str, Tensor]) -> Course:
    with mock.patch.object(type(backend.kernels), "grouping", return_value=Grouping(multiple=4)):
        return ours(backend, run, weights)


def test_experts_with_multiples_of_rows_get_the_rows_of_all_ranks(ranks: RankPool) -> None:
    layout_of_pair = next(one for one in LAYOUTS if one.world == 2 and one.ep == 2)
    run = draw("ep-multiples-mixtures", SEED, 0, layout_of_pair)
    courses = ranks.run(run.degrees.world, in_multiples, run, first_weights(run))
    errors = [(run, error_of(courses, wanted(run), run))]
    assert not failures(errors), failures(errors)


class CountsExchanges(C10dCollectives):
    """Counts the all-to-alls and the bytes that go into them."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.num_calls = self.num_bytes = 0

    def start_all_to_all(self, x: Tensor, axis: Axis, rows: RowCounts | None = None) -> Pending[Tensor]:
        assert axis.name == "ep"
        self.num_calls += 1
        self.num_bytes += x.nbytes
        return super().start_all_to_all(x, axis, rows)


def exchanges_of_a_step(backend: Backend, resolved: Resolved, weights: dict[str, Tensor]) -> tuple[int, int]:
    counting = backend.collectives = CountsExchanges(backend.world)
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), 1e-3)
    return counting.num_calls, counting.num_bytes


def test_a_step_exchanges_each_row_once_in_each_direction(ranks: RankPool) -> None:
    num_experts, k = 4, 2
    shape = {"num_local_experts": num_experts, "num_experts_per_tok": k, "intermediate_size": 6}
    resolved = layout("gqa2", tp=1, dp=2, ep=2, micro=1, family="mixtral", config=shape)
    found = ranks.run(2, exchanges_of_a_step, resolved, weights_of(resolved))
    train, model = resolved.config.train, resolved.model
    passes = train.global_batch // 2 * model.num_hidden_layers
    # The numbers of rows; rows, their weights and outputs; and the gradients of these three.
    assert [calls for calls, _ in found] == [7 * passes] * 2
    slots = train.micro_batch * train.seq_len * k
    floats = slots * (4 * model.hidden_size + 2)
    # A rank sends its own rows, and gives back those that the tokens of all ranks have chosen.
    assert sum(num_bytes for _, num_bytes in found) == 2 * passes * (4 * floats + 8 * num_experts)


def divided_by_copies(scale: float, axis: Axis) -> float:
    return scale if scale == 1.0 or not axis.name.startswith("expert") else 1.0 / axis.size


class DividesByCopies(C10dCollectives):
    """Divides the gradients of experts by the number of the ranks that hold them, and not of all that have tokens."""

    def start_all_reduce_bucket(
        self, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        return super().start_all_reduce_bucket(tensors, axis, dtype, divided_by_copies(scale, axis))

    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        return super().start_reduce_scatter(x, axis, divided_by_copies(scale, axis))


MUTANTS: dict[str, Any] = {
    "right": nullcontext,
    "divided by their copies": nullcontext,
    "counted once for each rank": lambda: mock.patch.object(Layout, "num_holders", lambda self, name: 1),
    "summed with other experts": lambda: mock.patch.object(Layout, "axes_of", lambda self, name: self.mesh.dense),
}
"""Defects that the losses, norms and weights of two steps must show."""


def train_with_defect(backend: Backend, resolved: Resolved, weights: dict[str, Tensor], defect: str) -> Course:
    if defect == "divided by their copies":
        backend.collectives = DividesByCopies(backend.world)
    with MUTANTS[defect]():
        state, shard = start(backend, resolved, weights), resolved.config.parallel.shard
        for module in state.model.modules():
            if defect == "divided by their copies" and isinstance(module, Experts) and shard == "full":
                cast(FSDPModule, module).set_gradient_divide_factor(state.mesh.experts.copies.size)
        data = [(rows[:, :-1], rows[:, 1:]) for rows in batches(resolved, STEPS)]
        return course_of(state, resolved, data)


DEFECTS = [
    *((shard, defect) for shard in ("none", "zero1", "full") for defect in ("right", "divided by their copies")),
    *(("none", defect) for defect in ("counted once for each rank", "summed with other experts")),
    ("zero1", "summed with other experts"),
]


@pytest.mark.parametrize(("shard", "defect"), DEFECTS)
def test_a_wrong_sum_of_experts_would_be_seen(ranks: RankPool, shard: str, defect: str) -> None:
    resolved = resolve({"tp": 1, "dp": 4, "ep": 2, "micro": 1, "shard": shard})
    weights = expert_weights(resolved)
    data = [(rows[:, :-1], rows[:, 1:]) for rows in batches(resolved, STEPS)]
    want = expert_reference(resolved, STEPS, data, weights)
    for course in ranks.run(4, train_with_defect, resolved, weights, defect):
        errors = [abs(norm / wanted - 1) for norm, wanted in zip(course.norms, want.norms, strict=True)]
        assert (max(errors) < 1e-5) == (defect == "right"), errors
