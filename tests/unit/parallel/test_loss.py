"""The chunked loss of one rank against torch's cross entropy on the whole logits."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nxtrain.backends.torch_kernels import cross_entropy, masked_cross_entropy
from nxtrain.common import vocab as vocab_module
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.sharding import Init
from nxtrain.common.vocab import IGNORE_INDEX, VocabColumns
from nxtrain.parallel.loss import VocabHead
from tests.support.models import ALONE, alone, filled, random

S, B, D, V = 16, 4, 8, 131
T = S * B


def head_of(weight: Tensor, rows: int) -> VocabHead:
    """A head whose chunks have so many rows."""
    vocab, width = weight.shape
    with torch.device("meta"):
        parallel, num_bytes = alone(weight.dtype), 4 * rows * vocab
        head = VocabHead(vocab, width, Init(), parallel, chunk_bytes=num_bytes)
    return filled(head, ALONE, {"": weight})


def targets_of(vocab: int = V) -> Tensor:
    """(S, B); the first quarter does not count, so that small chunks hold nothing that does, and some after it."""
    targets = torch.arange(T).mul(11).remainder(vocab)
    targets[: T // 4] = IGNORE_INDEX
    targets[T // 2 :: 5] = IGNORE_INDEX
    return targets.reshape(S, B)


def losses(rows: int) -> tuple[Tensor, Tensor]:
    """Ours and torch's sum of the losses."""
    hidden, weight = random(S, B, D), random(V, D, seed=1)
    ours = head_of(weight, rows).loss(hidden, targets_of())
    return ours.detach(), F.cross_entropy(
        F.linear(hidden, weight).flatten(0, 1), targets_of().flatten(), reduction="sum"
    )


@pytest.mark.parametrize("rows", [1, 7, 16, T, 10 * T])
def test_any_chunk_size_gives_the_loss_and_the_gradients_of_torch_in_float64(rows: int) -> None:
    hidden, weight = random(S, B, D).requires_grad_(), random(V, D, seed=1)
    head = head_of(weight, rows)
    loss = head.loss(hidden, targets_of()) * 0.125
    (loss * 3.0).backward()

    hidden64, weight64 = hidden.detach().double().requires_grad_(), weight.double().requires_grad_()
    logits = F.linear(hidden64, weight64).flatten(0, 1)
    expected = F.cross_entropy(logits, targets_of().flatten(), ignore_index=IGNORE_INDEX, reduction="sum") * 0.125
    (expected * 3.0).backward()
    for ours, theirs in (
        (loss.detach(), expected.detach()),
        (hidden.grad, hidden64.grad),
        (head.weight.grad, weight64.grad),
    ):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=2e-6)


def test_nothing_but_ignored_tokens_is_a_loss_and_a_gradient_of_zero() -> None:
    hidden = random(S, B, D).requires_grad_()
    head = head_of(random(V, D, seed=1), rows=7)
    loss = head.loss(hidden, torch.full((S, B), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None and head.weight.grad is not None
    assert not hidden.grad.any() and not head.weight.grad.any()


def test_a_loss_that_counts_ignored_tokens_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = losses(7)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    monkeypatch.setattr(vocab_module, "IGNORE_INDEX", IGNORE_INDEX - 1)
    assert losses(7)[0].item() > theirs.item() * 1.2


def test_nxd_4_8_the_loss_changes_none_of_its_inputs() -> None:
    """NxD 4.8: its parallel cross entropy overwrites the logits that it is given."""
    inputs = random(S, B, D), random(V, D, seed=1), targets_of()
    hidden, weight, targets = (x.clone() for x in inputs)
    head_of(weight, rows=7).loss(hidden.requires_grad_(), targets).backward()
    assert all(map(torch.equal, (hidden, weight, targets), inputs))


def test_nxd_4_8_bf16_logits_enter_a_float32_loss() -> None:
    """NxD 4.8: bf16 logits are exponentiated in bf16 there; here the loss is that of the same logits in float32."""
    hidden, weight = random(S, B, D, dtype=torch.bfloat16), random(V, D, dtype=torch.bfloat16, seed=1)
    head = head_of(weight, rows=T)
    loss = head.loss(hidden.requires_grad_(), targets_of())
    loss.backward()
    logits = F.linear(hidden, weight).detach().float().requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), targets_of().flatten(), reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logits.grad is not None and hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    # One rounding of the logits' gradient and one of the product with the weight, of 2**-8 each.
    wanted = logits.grad @ weight.float()
    assert (hidden.grad.float() - wanted).norm() < 2 * 2**-8 * wanted.norm()


def test_the_number_of_chunks_does_not_show_in_bf16_weight_gradients() -> None:
    grads = []
    for rows in (1, T):
        head = head_of(random(V, D, dtype=torch.bfloat16, seed=1), rows)
        head.loss(random(S, B, D, dtype=torch.bfloat16), targets_of()).backward()
        assert head.weight.grad is not None
        grads.append(head.weight.grad.float())
    # A sum of 64 parts rounded each time would be off by several roundings; a float32 one by the last alone.
    assert (grads[0] - grads[1]).norm() < 1.5 * 2**-8 * grads[1].norm()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_of_ten_thousand_neither_overflow_nor_vanish(sign: float) -> None:
    hidden, weight = random(S, B, D) * 1e4 * sign, random(V, D, seed=1)
    loss = head_of(weight, rows=7).loss(hidden, targets_of())
    logits = F.linear(hidden.double(), weight.double()).flatten(0, 1)
    assert logits.abs().max() > 1e4
    expected = F.cross_entropy(logits, targets_of().flatten(), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


class LargestTensor(TorchDispatchMode):
    """Entries of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_tensor_of_the_size_of_all_logits_is_made_forward_or_backward() -> None:
    vocab, rows = 4096, 16  # more than the width, whose product with the vocabulary is the gradient of the weight
    head = head_of(random(vocab, D, seed=1), rows)
    hidden = random(S, B, D).requires_grad_()
    with LargestTensor() as largest:
        head.loss(hidden, targets_of(vocab)).backward()
    assert largest.numel == rows * vocab > vocab * D
    assert largest.numel * 4 <= T * vocab


@pytest.mark.parametrize(("num_bytes", "rows"), [(1, 1), (4 * V, 1), (4 * V * 7, 7), (4 * V * 8 - 1, 7)])
def test_a_chunk_is_as_many_rows_of_float32_logits_as_its_bytes_hold_and_at_least_one(
    num_bytes: int, rows: int
) -> None:
    with torch.device("meta"):
        head = VocabHead(V, D, Init(), alone(torch.bfloat16), chunk_bytes=num_bytes)
    assert head._chunk_rows == rows


def test_evaluation_computes_no_gradient() -> None:
    head = head_of(random(V, D, seed=1), rows=7)
    with torch.no_grad():
        loss = head.loss(random(S, B, D), targets_of())
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(losses(7)[1].item(), rel=1e-6)


def test_logits_are_those_of_the_true_vocabulary_in_float32() -> None:
    hidden, weight = random(S, B, D, dtype=torch.bfloat16), random(V, D, dtype=torch.bfloat16, seed=1)
    assert torch.equal(head_of(weight, rows=1).logits(hidden), F.linear(hidden, weight).float())


@pytest.mark.parametrize("entropy", [cross_entropy, masked_cross_entropy])
def test_losses_of_tokens_are_as_exact_as_those_of_torch_at_any_logits(entropy: Callable[..., Any]) -> None:
    """The differences of large logits decide a loss, so that their size must not decide its rounding."""
    rng = Random(0)
    for number in range(12):
        vocab, spread, shift = rng.choice((2, 40, 900)), rng.uniform(0.1, 6.0), rng.uniform(-60.0, 60.0)
        logits = random(300, vocab, seed=number, scale=spread) + shift
        generator = torch.Generator().manual_seed(number)
        targets = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
        columns = VocabColumns(torch.tensor([0, vocab]), None, C10dCollectives(1), ALONE)
        ours, _ = entropy(logits.clone(), targets, columns, needs_grad=False)
        theirs = F.cross_entropy(logits, targets, reduction="none")
        exact = F.cross_entropy(logits.double(), targets, reduction="none")
        mine, other = ((losses.double() - exact).square().mean().sqrt() for losses in (ours, theirs))
        assert mine <= 1.3 * other + 1e-8, (vocab, spread, shift)
