"""Each layer that is cut over tp computes what the whole layer computes, forward and backward, in float64.

Sequences of activations are cut over tp under sequence parallelism, features by the layers; both cuts are `ShardSpec`s
here, so that a rank's part of a whole activation is cut as a weight is.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sharding import Init, Segment, ShardSpec
from nxtrain.parallel.embedding import VocabEmbedding
from nxtrain.parallel.linear import ColumnLinear, RowLinear
from nxtrain.parallel.regions import TensorParallel
from tests.support.models import filled, random
from tests.support.ranks import RankPool

S, B, D, IN, V = 8, 2, 6, 10, 13
Q, K = 8, 4
DTYPE = torch.float64

WHOLE = ShardSpec((S, B, D))
SEQUENCE = ShardSpec((S, B, D), dim=0)


@dataclass(frozen=True)
class Case:
    """A layer, and what flows through it."""

    x: Tensor
    weights: dict[str, Tensor]
    grad: Tensor
    x_cut: ShardSpec | None
    out_cut: ShardSpec | None
    biases: dict[str, Tensor] | None = None


def case_of(name: str, tp: int) -> Case:
    grad = random(S, B, D, dtype=DTYPE, seed=3)
    if name in ("column", "column with biases"):
        # Fused as in attention: two heads of two rows in the second segment, copied when tp exceeds them.
        segments = (Segment("q", Q), Segment("k", K, max(1, tp // 2)))
        weights = {"q": random(Q, D, dtype=DTYPE), "k": random(K, D, dtype=DTYPE, seed=1)}
        out_cut = ShardSpec((S, B, Q + K), dim=2, segments=segments)
        biases = {"q": random(Q, dtype=DTYPE, seed=4), "k": random(K, dtype=DTYPE, seed=5)}
        whole_grad = random(S, B, Q + K, dtype=DTYPE, seed=3)
        return Case(
            random(S, B, D, dtype=DTYPE), weights, whole_grad, None, out_cut, biases if name != "column" else None
        )
    if name == "row":
        weights = {"": random(D, IN, dtype=DTYPE, seed=1)}
        return Case(random(S, B, IN, dtype=DTYPE), weights, grad, ShardSpec((S, B, IN), dim=2), None)
    tokens = torch.arange(S * B).remainder(V).reshape(S, B)
    return Case(tokens, {"": random(V, D, dtype=DTYPE)}, grad, ShardSpec((S, B)), None)


def layer_of(name: str, case: Case, tp: TensorParallel) -> nn.Module:
    layer: nn.Module
    with torch.device("meta"):
        if case.out_cut is not None:
            layer = ColumnLinear(D, case.out_cut.segments, Init(), tp, bias=case.biases is not None)
        elif name == "row":
            layer = RowLinear(IN, D, Init(), tp)
        else:
            layer = VocabEmbedding(V, D, Init(), tp)
    return filled(layer, tp.axis, case.weights, case.biases)


def cut(whole: Tensor, spec: ShardSpec | None, axis: Axis, sp: bool) -> Tensor:
    """A rank's part of an activation."""
    spec = spec or (SEQUENCE if sp else WHOLE)
    sizes = [segment.size for segment in spec.segments]
    parts = whole.split(sizes, spec.dim or 0)
    return spec.shard({s.name: part for s, part in zip(spec.segments, parts, strict=True)}, axis)


@dataclass(frozen=True)
class Found:
    """Of one rank, or whole; tokens have no gradient."""

    out: Tensor
    x_grad: Tensor | None
    weight_grad: Tensor
    bias_grad: Tensor | None


def run(backend: Backend, name: str, tp: int, sp: bool) -> Found:
    axis = Mesh.build(tp, backend.rank, tp=tp).tp
    case = case_of(name, tp)
    layer = layer_of(name, case, TensorParallel(axis, backend.collectives, backend.kernels, DTYPE, sp))
    x = cut(case.x, case.x_cut, axis, sp)
    x.requires_grad_(x.is_floating_point())
    out = layer(x)
    grad = cut(case.grad, case.out_cut, axis, sp)
    if case.out_cut is not None:
        # The queries of one head copy and of another see different things: here each sees an equal part.
        for piece, view in case.out_cut.views(grad, axis):
            view.div_(piece.copies)
    out.backward(grad)
    bias = getattr(layer, "bias", None)
    return Found(out.detach(), x.grad, layer.weight.grad, bias if bias is None else bias.grad)  # type: ignore[arg-type]


def expected(name: str, case: Case) -> Found:
    """The same on whole tensors with torch's functions."""
    x = case.x.clone().requires_grad_(case.x.is_floating_point())
    weight = torch.cat(list(case.weights.values())).requires_grad_()
    bias = None if case.biases is None else torch.cat(list(case.biases.values())).requires_grad_()
    out = F.embedding(x, weight) if name == "embedding" else F.linear(x, weight, bias)
    out.backward(case.grad)
    assert weight.grad is not None
    return Found(out.detach(), x.grad, weight.grad, None if bias is None else bias.grad)


@pytest.mark.parametrize(("tp", "sp"), [(2, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("name", ["column", "column with biases", "row", "embedding"])
def test_a_cut_layer_equals_the_whole_one(ranks: RankPool, name: str, tp: int, sp: bool) -> None:
    case = case_of(name, tp)
    want = expected(name, case)
    weight_grad: dict[str, Tensor] = {}
    bias_grad: dict[str, Tensor] = {}
    for rank, found in enumerate(ranks.run(tp, run, name, tp, sp)):
        axis = Mesh.build(tp, rank, tp=tp).tp
        assert_close(found.out, cut(want.out, case.out_cut, axis, sp))
        if want.x_grad is not None:
            assert_close(found.x_grad, cut(want.x_grad, case.x_cut, axis, sp))
        spec = weight_spec(name, case)
        add_up(weight_grad, spec, found.weight_grad, axis)
        if found.bias_grad is not None:
            add_up(bias_grad, spec.of_bias(), found.bias_grad, axis)
    assert_close(torch.cat(list(weight_grad.values())), want.weight_grad)
    assert bool(bias_grad) == (want.bias_grad is not None)
    if want.bias_grad is not None:
        assert_close(torch.cat(list(bias_grad.values())), want.bias_grad)


def add_up(total: dict[str, Tensor], spec: ShardSpec, part: Tensor, axis: Axis) -> None:
    """Add a rank's gradient to the whole ones."""
    for piece, view in spec.views(part, axis):
        whole = total.setdefault(piece.segment.name, view.new_zeros(spec.global_shape(piece.segment)))
        whole.narrow(spec.dim or 0, piece.start, piece.length).add_(view)


def weight_spec(name: str, case: Case) -> ShardSpec:
    """Sharding of the layer's weight."""
    if case.out_cut is not None:
        return ShardSpec((Q + K, D), dim=0, segments=case.out_cut.segments)
    return ShardSpec((D, IN), dim=1) if name == "row" else ShardSpec((V, D), dim=0)


def assert_close(found: Tensor | None, want: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
