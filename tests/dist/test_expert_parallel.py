"""Experts on some ranks only: losses, norms and weights of any layout next to plain experts on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nxtrain.backends.base import Backend
from nxtrain.common.blockwise import BlockwiseKernel
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Pending, RowCounts
from nxtrain.common.family import BuildContext, ModelConfig, find_family
from nxtrain.common.kernels import Grouping
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sharding import Init, Layout, Segment, ShardSpec
from nxtrain.config.check import Resolved
from nxtrain.parallel.dispatch import static_dispatch
from nxtrain.parallel.expert_parallel import ExpertParallel
from nxtrain.parallel.expert_products import ExpertMatrices
from nxtrain.parallel.regions import TensorParallel
from nxtrain.train.step import train_step
from tests.support.contract_experts import drawn_indices, exact_mixture
from tests.support.drawn import SEED, Drawn, draw, one_in
from tests.support.drawn_runs import check_drawn, first_weights, ours, wanted
from tests.support.layouts import covering_array
from tests.support.models import hf_model, weights_of
from tests.support.nki_blockwise import STAND_INS
from tests.support.parity import (
    Course,
    Pairs,
    batches,
    check_course,
    course_of,
    layout,
    local_batch,
    reference,
    run_ours,
    start,
)
from tests.support.ranks import RankPool


class Matrices(nn.Module):
    """One fused matrix of all experts of a rank."""

    def __init__(self, spec: ShardSpec, tp: TensorParallel) -> None:
        super().__init__()
        self.weight, self.specs = tp.empty(spec), {"weight": spec}

    def of(self, index: int, axis: Axis) -> Tensor:
        """A segment's rows, or its columns."""
        spec = self.specs["weight"]
        piece = spec.pieces(axis)[index]
        return self.weight.narrow(spec.dim or 0, piece.local_start, piece.local_length)


class Experts(nn.Module):
    """Experts of this rank, for the tokens of all ranks of the group."""

    def __init__(self, size: tuple[int, int, int], tp: TensorParallel, exchange: ExpertParallel | None) -> None:
        super().__init__()
        num_experts, hidden, inner = size
        self._tp, self._own, self._ep = tp, range(num_experts), None
        if exchange is not None:
            self._own = exchange.own(num_experts)
            self._ep = TensorParallel(exchange.axis, exchange.comm, tp.kernels, tp.dtype, sequence_parallel=True)
        ups = tuple(Segment(f"{e}.{name}", inner) for e in self._own for name in ("gate_proj", "up_proj"))
        downs = tuple(Segment(f"{e}.down_proj", inner) for e in self._own)
        up = replace(ShardSpec.column(hidden, ups), expert=True)
        down = ShardSpec((hidden, inner * len(downs)), dim=1, segments=downs, expert=True)
        self.gate_up_proj, self.down_proj = Matrices(up, tp), Matrices(down, tp)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """(S, B, D) and (S, B, E) to (S, B, D), a partial sum over tp."""
        if self._ep is not None:
            x, weights = self._ep.enter(x), self._ep.enter(weights)
        axis, outputs = self._tp.axis, []
        for index, expert in enumerate(self._own):
            gate, up = (self.gate_up_proj.of(2 * index + part, axis) for part in (0, 1))
            hidden = F.silu(F.linear(x, gate)) * F.linear(x, up)
            outputs.append(F.linear(hidden, self.down_proj.of(index, axis)) * weights[..., expert, None].to(x.dtype))
        total = torch.stack(outputs).sum(0)
        return total if self._ep is None else self._ep.exit(total)


class SoftExperts(nn.Module):
    """Feed-forward whose experts all compute every token, weighted by a router."""

    def __init__(self, size: tuple[int, int, int], tp: TensorParallel, exchange: ExpertParallel | None) -> None:
        super().__init__()
        self._tp = tp
        router = ShardSpec(size[:2], init=Init("normal", 0.3), partial_gradient=tp.sequence_parallel)
        self.gate = Matrices(router, tp)
        self.experts = Experts(size, tp, exchange)

    def forward(self, x: Tensor) -> Tensor:
        """(S/tp, B, D) to (S/tp, B, D)."""
        weights = F.linear(x, self.gate.weight).float().softmax(-1)
        return self._tp.exit(self.experts(self._tp.enter(x), self._tp.enter(weights)))


_LLAMA = type(find_family("llama"))


@dataclass
class ExpertFamily(_LLAMA):  # type: ignore[valid-type, misc]
    """Llama whose feed-forwards are soft experts."""

    num_experts: int = 4
    inner: int = 7

    def build(self, config: ModelConfig, context: BuildContext) -> nn.Module:
        model = super().build(config, context)
        tp = cast(TensorParallel, cast(Any, context.layers)._parallel)
        size = self.num_experts, config.hidden_size, self.inner
        with torch.device("meta"):
            for block in model.blocks:
                block.mlp = SoftExperts(size, tp, cast(Any, context.layers)._expert_parallel)
        return cast(nn.Module, model)


def with_experts(resolved: Resolved, num_experts: int, inner: int = 7) -> Resolved:
    """The same run of a model with experts."""
    return replace(resolved, family=ExpertFamily(num_experts, inner))


def expert_weights(resolved: Resolved) -> dict[str, Tensor]:
    """Whole weights by global name, in float32."""
    model = _with_plain_experts(hf_model(resolved), cast(ExpertFamily, resolved.family))
    generator = torch.Generator().manual_seed(1)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * (0.3 if ".gate." in name else 0.1)
        weights[name] = drawn + (1.0 if "norm" in name else 0.0)
    return weights


def expert_reference(resolved: Resolved, steps: int, data: Pairs, weights: Mapping[str, Tensor]) -> Course:
    """transformers' model with plain experts and torch's AdamW in float64, on one process."""
    family = cast(ExpertFamily, resolved.family)

    def wrap(model: nn.Module) -> nn.Module:
        model = _with_plain_experts(model, family).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        return model

    dense = dict(hf_model(resolved).named_parameters())
    return reference(resolved, steps, data, {name: weights.get(name, p) for name, p in dense.items()}, wrap)


class _PlainExpert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class _PlainExperts(nn.Module):
    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(_PlainExpert(hidden, inner) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return torch.stack([expert(x) * weights[..., e, None] for e, expert in enumerate(self.experts)]).sum(0)


def _with_plain_experts(model: nn.Module, family: ExpertFamily) -> nn.Module:
    layers = cast(Any, model).model.layers
    for layer in layers:
        layer.mlp = _PlainExperts(family.num_experts, layer.mlp.gate_proj.in_features, family.inner)
    return model


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


@pytest.mark.parametrize("how", one_in(6, SOFT), ids=lambda how: "-".join(f"{k}{v}" for k, v in how.items()))
def test_experts_of_any_layout_equal_plain_experts(ranks: RankPool, how: dict[str, Any]) -> None:
    resolved = resolve(how)
    weights = expert_weights(resolved)
    data = [(rows[:, :-1], rows[:, 1:]) for rows in batches(resolved, STEPS)]
    courses = ranks.run(how["tp"] * how["pp"] * how["dp"] * how["cp"], train, resolved, weights)
    check_course(courses, expert_reference(resolved, STEPS, data, weights), resolved)


LAYOUTS = covering_array(SEED, 48, ep=True)


@pytest.mark.parametrize("index", one_in(8, range(len(LAYOUTS))), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_with_divided_experts_equals_transformers(ranks: RankPool, index: int) -> None:
    run = draw("ep-mixtures", SEED, index, LAYOUTS[index])
    courses = ranks.run(run.degrees.world, ours, run, first_weights(run))
    check_drawn(courses, wanted(run), run)


def in_multiples(backend: Backend, run: Drawn, weights: dict[str, Tensor]) -> Course:
    with mock.patch.object(type(backend.kernels), "grouping", return_value=Grouping(multiple=4)):
        return ours(backend, run, weights)


def test_experts_with_multiples_of_rows_get_the_rows_of_all_ranks(ranks: RankPool) -> None:
    layout_of_pair = next(one for one in LAYOUTS if one.world == 2 and one.ep == 2)
    run = draw("ep-multiples-mixtures", SEED, 0, layout_of_pair)
    courses = ranks.run(run.degrees.world, in_multiples, run, first_weights(run))
    check_drawn(courses, wanted(run), run)


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
    result = ranks.run(2, exchanges_of_a_step, resolved, weights_of(resolved))
    train, model = resolved.config.train, resolved.model
    passes = train.global_batch // 2 * model.num_hidden_layers
    # The numbers of rows; rows, their weights and outputs; and the gradients of these three.
    assert [calls for calls, _ in result] == [7 * passes] * 2
    slots = train.micro_batch * train.seq_len * k
    floats = slots * (4 * model.hidden_size + 2)
    # A rank sends its own rows, and gives back those that the tokens of all ranks have chosen.
    assert sum(num_bytes for _, num_bytes in result) == 2 * passes * (4 * floats + 8 * num_experts)


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


def blocks_of_a_rank(
    backend: Backend, num_experts: int, indices: Tensor, kernel: BlockwiseKernel | None
) -> list[Tensor]:
    """Outputs and gradients of this rank's tokens and experts, by shapes that depend on no routing."""
    mesh = Mesh.build(backend.world, backend.rank, ep=backend.world)
    exchange = ExpertParallel(mesh.ep, backend.collectives)
    own, rank = exchange.own(num_experts), backend.rank
    x, weights, gate_up, down, grad = operands_of(num_experts, indices, kernel)
    width = down.shape[1] // num_experts
    mine = [x.chunk(backend.world)[rank], weights.chunk(backend.world)[rank]]
    mine += [gate_up[own.start * 2 * width : own.stop * 2 * width]]
    mine += [down[:, own.start * width : own.stop * width]]
    given = [tensor.clone().requires_grad_() for tensor in mine]
    numbers = indices.chunk(backend.world)[rank]
    matrices = ExpertMatrices(given[2], given[3], len(own))
    out = static_dispatch(given[0], given[1], numbers, matrices, num_experts, None, exchange, kernel)
    out.backward(grad.chunk(backend.world)[rank])
    return [out.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)]


def operands_of(num_experts: int, indices: Tensor, kernel: BlockwiseKernel | None) -> list[Tensor]:
    """Tokens, weights, matrices and a gradient; the kernel takes no small sizes."""
    size, width, scale = (4, 3, 1.0) if kernel is None else (512, 64, 0.05)
    tokens, inputs = (len(indices), size), (num_experts * 2 * width, size)
    shapes = (tokens, tuple(indices.shape), inputs, (size, num_experts * width), tokens)
    generators = [torch.Generator().manual_seed(index) for index in range(len(shapes))]
    drawn = [torch.randn(shape, generator=g) for shape, g in zip(shapes, generators, strict=True)]
    return [x * scale if shape[0] > 2 * len(indices) else x for x, shape in zip(drawn, shapes, strict=True)]


@pytest.mark.parametrize(
    ("num_experts", "k", "kernel"), [(4, 2, None), (16, 2, None), (16, 1, None), (4, 2, STAND_INS)]
)
@pytest.mark.parametrize("routing", ["drawn", "one rank's experts for all tokens"])
def test_blocks_of_equal_size_hold_every_routing(
    ranks: RankPool, num_experts: int, k: int, kernel: BlockwiseKernel | None, routing: str
) -> None:
    indices = torch.arange(k).repeat(10, 1)
    if routing == "drawn":
        indices = drawn_indices(Random(num_experts), 10, k, num_experts)
    x, weights, gate_up, down, grad = operands_of(num_experts, indices, kernel)
    given = [tensor.clone().requires_grad_() for tensor in (x, weights, gate_up, down)]
    out = exact_mixture(given[0], given[1], indices, given[2], given[3], num_experts)
    out.backward(grad)
    actual = ranks.run(2, blocks_of_a_rank, num_experts, indices, kernel)
    wanted = [out.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)]
    for index, want in enumerate(wanted):
        whole = torch.cat([of_rank[index] for of_rank in actual], dim=1 if index == len(wanted) - 1 else 0)
        torch.testing.assert_close(whole, want, rtol=0, atol=2e-6 * max(1.0, float(want.abs().max())))
