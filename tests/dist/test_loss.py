"""The loss over a vocabulary that is cut over tp is torch's cross entropy on the whole logits, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Init, ShardSpec
from nxtrain.common.vocab import IGNORE_INDEX
from nxtrain.parallel.loss import VocabHead
from nxtrain.parallel.regions import TensorParallel
from tests.support.models import filled, random
from tests.support.ranks import RankPool

S, B, D = 8, 3, 16
CHUNKS = (1, 5, S * B)
"""Rows per chunk: single rows, a ragged last chunk, all at once."""


@dataclass(frozen=True)
class Found:
    loss: Tensor
    z_loss: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor
    logits: Tensor


def given(vocab: int, scale: float) -> Mapping[str, Tensor]:
    """Hidden states, weight and targets; every third target does not count, nor do the first five."""
    targets = torch.arange(S * B).mul(7).remainder(vocab).reshape(S, B)
    targets = targets.masked_fill(torch.arange(S * B).reshape(S, B) % 3 == 0, IGNORE_INDEX)
    targets.view(-1)[:5] = IGNORE_INDEX
    return {"hidden": random(S, B, D) * scale, "weight": random(vocab, D, seed=1), "targets": targets}


@cache
def expected(vocab: int, scale: float, z_loss: float = 0.0) -> Found:
    tensors = given(vocab, scale)
    hidden, weight = tensors["hidden"].double().requires_grad_(), tensors["weight"].double().requires_grad_()
    logits = F.linear(hidden, weight)
    targets = tensors["targets"].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    added = z_loss * logits.flatten(0, 1)[targets != IGNORE_INDEX].logsumexp(dim=1).square().sum()
    (loss + added).backward()
    assert hidden.grad is not None and weight.grad is not None
    return Found(loss.detach(), added.detach(), hidden.grad, weight.grad, logits.detach())


def run(backend: Backend, vocab: int, scale: float, tp: int, sp: bool, rows: int, z_loss: float = 0.0) -> Found:
    axis = Mesh.build(tp, backend.rank, tp=tp).tp
    parallel = TensorParallel(axis, backend.collectives, backend.kernels, torch.float32, sp)
    tensors = given(vocab, scale)
    with torch.device("meta"):
        num_bytes = 4 * rows * -(-vocab // tp)
        head = VocabHead(vocab, D, Init(), parallel, chunk_bytes=num_bytes)
    filled(head, axis, {"": tensors["weight"]})
    head.z_loss, head.z_sum = z_loss, torch.zeros(1)
    hidden = tensors["hidden"].chunk(tp)[backend.rank].clone() if sp else tensors["hidden"].clone()
    hidden.requires_grad_()
    before = hidden.detach().clone(), head.weight.detach().clone(), tensors["targets"].clone()
    loss = head.loss(hidden, tensors["targets"])
    loss.backward()
    assert all(map(torch.equal, before, (hidden.detach(), head.weight.detach(), tensors["targets"])))
    assert hidden.grad is not None and head.weight.grad is not None
    with torch.no_grad():
        assert head.loss(hidden, tensors["targets"]).equal(loss.detach()), "an evaluation has the cross entropy alone"
    return Found(loss.detach(), head.z_sum.squeeze(0), hidden.grad, head.weight.grad, head.logits(hidden))


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize(
    ("vocab", "tp", "sp"),
    [
        (12, 1, False),
        (12, 2, True),
        (131, 2, False),
        (131, 4, True),
        (5, 4, False),  # the last rank holds nothing but padding
    ],
)
@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_loss_and_gradients_equal_torch(
    ranks: RankPool, vocab: int, tp: int, sp: bool, rows: int, z_loss: float
) -> None:
    want = expected(vocab, 1.0, z_loss)
    spec = ShardSpec((vocab, D), dim=0)
    for rank, actual in enumerate(ranks.run(tp, run, vocab, 1.0, tp, sp, rows, z_loss)):
        axis = Mesh.build(tp, rank, tp=tp).tp
        hidden_grad = want.hidden_grad.chunk(tp)[rank] if sp else want.hidden_grad
        pairs = [
            (actual.loss, want.loss),
            (actual.z_loss, want.z_loss),
            (actual.hidden_grad, hidden_grad),
            (actual.weight_grad, spec.shard({"": want.weight_grad}, axis)),
            (actual.logits, want.logits),
        ]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-6)


def test_extreme_logits_do_not_overflow(ranks: RankPool) -> None:
    want = expected(131, 1e4)
    assert want.logits.abs().max() > 1e4
    for actual in ranks.run(2, run, 131, 1e4, 2, False, 5):
        assert actual.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
        torch.testing.assert_close(actual.hidden_grad.double(), want.hidden_grad, rtol=1e-5, atol=1e-5)
