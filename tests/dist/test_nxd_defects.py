"""Silent defects of NeuronX Distributed 0.18, checked against the unsharded model with either set of layers.

Beside each rule stands the mutant that makes the same mistake, to show that the rule would see it. The defects were
found by reading and running NeuronX Distributed; 4.1 and so on number them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Done, Op, Pending
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.config.check import Resolved
from nxtrain.parallel.grads import Gradients, SquareSum
from nxtrain.train.build import build_model, build_state
from nxtrain.train.step import train_step
from tests.support.models import weights_of
from tests.support.parity import (
    LR,
    Gradient,
    batches,
    gradient,
    layout,
    local_batch,
    rank_gradient,
    relative_errors,
    start,
    table_of,
    whole,
)
from tests.support.ranks import RankPool

BF16_ROUNDING = 2.0**-8
"""Largest relative error of one rounding to bfloat16."""
NUM_ROUNDINGS = 40
"""Roundings between a weight's gradient and the loss, there and back: ten per half block, two halves, two blocks."""
BF16_BOUND = (2 * NUM_ROUNDINGS) ** 0.5 * BF16_ROUNDING
"""Relative L2 distance of two gradients that rounded differently: independent errors add as squares."""


def gradients(pool: RankPool, resolved: Resolved) -> list[Gradient]:
    return pool.run(resolved.config.parallel.tp, rank_gradient, resolved, weights_of(resolved))


@cache
def unsharded(shape: str) -> Resolved:
    return layout(shape, tp=1)


class KeepsInputGradient(C10dCollectives):
    """Does not sum the gradient of a column layer's input over the ranks."""

    def all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Tensor:
        return super().start_all_reduce(x, axis, op).wait()

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Pending[Tensor]:
        return Done(x)


def gradient_without_input_sum(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Gradient:
    backend.collectives = KeepsInputGradient(backend.world)
    return rank_gradient(backend, resolved, weights)


def gradient_with_nxd_reduce_dtype(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Gradient:
    """Leaves the type of NxD's sums as NxD has it, float32."""
    state = start(backend, resolved, weights)
    for module in state.model.modules():
        if hasattr(module, "reduce_dtype"):
            vars(module)["reduce_dtype"] = torch.float32
    (batch,) = batches(resolved, 1)
    return gradient(state, local_batch(state, batch, resolved.config.train.micro_batch))


INPUT_SUM_MUTANTS = {"native": gradient_without_input_sum, "nxd": gradient_with_nxd_reduce_dtype}


def test_nxd_4_1_bf16_gradients_without_sequence_parallelism_equal_the_unsharded_ones(either: RankPool) -> None:
    """4.1: the gradient of a column layer's input must be summed over tp even where its type is narrow."""
    (alone,) = gradients(either, layout("gqa2", tp=1, params="bf16"))
    expected = whole([alone.shards], layout("gqa2", tp=1, params="bf16"))
    sharded = layout("gqa2", tp=2, params="bf16")
    actual = gradients(either, sharded)
    errors = relative_errors(whole([rank.shards for rank in actual], sharded), expected)
    assert max(errors.values()) < BF16_BOUND, errors
    assert actual[0].norm == pytest.approx(alone.norm, rel=BF16_BOUND / 4)

    mutants = either.run(2, INPUT_SUM_MUTANTS[either.layers], sharded, weights_of(sharded))
    wrong = relative_errors(whole([rank.shards for rank in mutants], sharded), expected)
    assert wrong["model.embed_tokens.weight"] > 5 * BF16_BOUND
    assert mutants[0].norm != pytest.approx(alone.norm, rel=BF16_BOUND)


@pytest.mark.parametrize(("shape", "tp"), [("gqa2", 2), ("gqa2", 4), ("odd", 2)])
@pytest.mark.parametrize("sp", [False, True])
def test_nxd_4_2_fused_projections_have_the_gradients_and_the_norm_of_separate_ones(
    either: RankPool, shape: str, tp: int, sp: bool
) -> None:
    """4.2: a fused matrix takes part in the global norm as what it holds, so clipping does not depend on fusing."""
    fused = layout(shape, tp=tp, sp=sp)
    separate = layout(shape, tp=tp, sp=sp, fused_qkv=False, fused_gate_up=False)
    a, b = gradients(either, fused), gradients(either, separate)
    errors = relative_errors(whole([rank.shards for rank in a], fused), whole([rank.shards for rank in b], separate))
    assert max(errors.values()) < 1e-6, errors
    assert [rank.norm for rank in a] == pytest.approx([rank.norm for rank in b], rel=1e-6)


class CountsEveryCopy(SquareSum):
    """Counts a replicated K/V head once per rank that holds it."""

    def __init__(self, layout: Layout, shards: Mapping[str, Tensor], kernels: Kernels) -> None:
        super().__init__(layout, shards, lambda host: host, kernels)
        self._row_weights = {name: torch.ones_like(weights) for name, weights in self._row_weights.items()}


def norms_counting_copies(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> float:
    state = start(backend, resolved, weights)
    state.gradients.square_sum = CountsEveryCopy(state.layout, state.data_parallel.shards, backend.kernels)
    (batch,) = batches(resolved, 1)
    return gradient(state, local_batch(state, batch, resolved.config.train.micro_batch)).norm


@pytest.mark.parametrize(("shape", "tp", "replicas"), [("mqa", 2, 2), ("gqa2", 4, 2), ("mqa", 4, 4)])
def test_nxd_4_3_replicated_heads_have_the_gradients_and_the_norm_of_single_ones(
    either: RankPool, shape: str, tp: int, replicas: int
) -> None:
    """4.3: a K/V head that several ranks hold counts once in the norm, and its gradient sums what all of them saw."""
    (alone,) = gradients(either, unsharded(shape))
    expected = whole([alone.shards], unsharded(shape))
    sharded = layout(shape, tp=tp, sp=tp == 4)
    mesh = Mesh.build(tp, 0, tp=tp)
    qkv = table_of(sharded, mesh)["model.layers.0.self_attn.qkv_proj.weight"]
    assert [piece.copies for piece in qkv.pieces(mesh.tp)] == [1, replicas, replicas]
    actual = gradients(either, sharded)
    errors = relative_errors(whole([rank.shards for rank in actual], sharded), expected)
    assert max(errors.values()) < 2e-6, errors
    assert [rank.norm for rank in actual] == pytest.approx([alone.norm] * tp, rel=1e-6)
    assert [rank.scale for rank in actual] == pytest.approx([alone.scale] * tp, rel=1e-6)
    assert alone.scale < 1.0

    mutants = either.run(tp, norms_counting_copies, sharded, weights_of(sharded))
    assert mutants[0] > alone.norm * 1.01


def drawn_then_trained(backend: Backend, resolved: Resolved, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's drawn weights, and all of its state after some steps."""
    mesh = Mesh.build(backend.world, backend.rank, tp=resolved.config.parallel.tp)
    state = build_state(resolved, build_model(resolved, backend, mesh, init="draw"), backend, mesh)
    drawn = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    for batch in batches(resolved, steps):
        train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), LR)
    kinds = {"param": {name: p.detach() for name, p in state.model.named_parameters()}, **state.optimizer.state}
    return drawn, {f"{kind}/{name}": t for kind, tensors in kinds.items() for name, t in tensors.items()}


@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "tp"), [("mqa", 2), ("gqa2", 4)])
def test_nxd_4_4_copies_of_a_head_are_equal_bits_when_drawn_and_after_training(
    either: RankPool, shape: str, tp: int, params: str
) -> None:
    """4.4: ranks that share a K/V head start with the same rows and never drift apart; so do replicated norms."""
    resolved = layout(shape, tp=tp, sp=True, params=params)
    by_rank = either.run(tp, drawn_then_trained, resolved, 5)
    compared = 0
    for rank in range(tp):
        axis = Mesh.build(tp, rank, tp=tp).tp
        for name, spec in table_of(resolved, Mesh.build(tp, rank, tp=tp)).items():
            for piece in spec.pieces(axis):
                if piece.copy == 0:
                    continue
                compared += 1
                where = (spec.dim or 0, piece.local_start, piece.length)
                first = rank - piece.copy
                assert torch.equal(by_rank[rank][0][name].narrow(*where), by_rank[first][0][name].narrow(*where)), name
                for key, tensor in by_rank[rank][1].items():
                    if key.partition("/")[2] == name:
                        assert torch.equal(tensor.narrow(*where), by_rank[first][1][key].narrow(*where)), key
    assert compared


@pytest.mark.parametrize(("tp", "fused"), [(2, True), (4, True), (4, False)])
def test_padding_stays_zero_through_momentum_and_weight_decay(either: RankPool, tp: int, fused: bool) -> None:
    resolved = layout("odd", tp=tp, sp=True, fused_gate_up=fused)
    by_rank = either.run(tp, drawn_then_trained, resolved, 5)
    padded = 0
    for rank in range(tp):
        mesh = Mesh.build(tp, rank, tp=tp)
        table = table_of(resolved, mesh)
        for key, tensor in by_rank[rank][1].items():
            spec = table[key.partition("/")[2]]
            for piece in spec.pieces(mesh.tp):
                end, width = piece.local_start + piece.length, piece.local_length - piece.length
                padding = tensor.narrow(spec.dim or 0, end, width)
                padded += padding.numel()
                assert not padding.any(), key
    assert padded


def gradient_without_norm_sum(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Gradient:
    """Takes the gradient of a norm weight, of which each rank has a part, for the whole."""
    state = start(backend, resolved, weights)
    table = ParamTable({name: replace(spec, partial_gradient=False) for name, spec in state.table.items()})
    state.data_parallel.layout = Layout(table, state.mesh)
    grads = Gradients(state.data_parallel, backend.collectives, backend.put, backend.kernels)
    (batch,) = batches(resolved, 1)
    mutant = replace(state, gradients=grads)
    return gradient(mutant, local_batch(mutant, batch, resolved.config.train.micro_batch))


def test_norm_weights_under_sequence_parallelism_have_the_gradient_of_the_whole_sequence(either: RankPool) -> None:
    (alone,) = gradients(either, unsharded("gqa2"))
    expected = whole([alone.shards], unsharded("gqa2"))
    sharded = layout("gqa2", tp=2, sp=True)

    def norm_errors(actual: list[Gradient]) -> list[float]:
        errors = relative_errors(whole([rank.shards for rank in actual], sharded), expected)
        return [error for name, error in errors.items() if "norm" in name]

    actual = norm_errors(gradients(either, sharded))
    assert len(actual) == 5
    assert max(actual) < 2e-6
    assert min(norm_errors(either.run(2, gradient_without_norm_sum, sharded, weights_of(sharded)))) > 0.1
