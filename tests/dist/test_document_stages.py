"""Masks between documents under every layout with stages: each document computes what transformers computes alone.

Defects that peers have had with packed documents are mutants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Done
from nxtrain.common.kernels import Kernels, KeyRanges
from nxtrain.common.vocab import END_BIT, ID_MASK, IGNORE_INDEX
from nxtrain.config.check import Resolved
from nxtrain.data.loader import batch_of
from nxtrain.nn import attention
from nxtrain.parallel import context_parallel
from nxtrain.parallel.context_parallel import ContextParallel
from nxtrain.train import step
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import TrainState, eval_step
from tests.support.attention_calls import FlashOnCpu
from tests.support.corpora import END, drawn_row
from tests.support.models import hf_model, weights_of
from tests.support.parity import Gradient, gradient, layout, relative_errors, start, whole
from tests.support.ranks import RankPool

Rows = NDArray[np.int64]


def drawn_rows(random: Random, number: int, seq_len: int, vocab_size: int) -> Rows:
    """Rows of packed documents, of which some have targets."""
    rows = np.full((number, seq_len + 1), IGNORE_INDEX, np.int64)
    while not (rows[:, 1:] != IGNORE_INDEX).any() or (rows & END_BIT).all():
        rows = np.array([drawn_row(random, vocab_size, seq_len) for _ in range(number)])
    return rows


def documents_on_rank(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], rows: Rows, flash: bool = False
) -> tuple[Gradient, float]:
    """Gradient of a global batch, and the mean loss that an evaluation finds.

    Args:
        flash: Attention takes calls of a flash kernel, as on GPUs.
    """
    with patch.object(backend, "kernels", FlashOnCpu() if flash else backend.kernels):
        return _gradient_and_loss(backend, resolved, weights, rows)


def packed_documents(state: TrainState, resolved: Resolved, rows: Rows) -> DeviceBatch:
    """This rank's part of a global batch of packed documents."""
    dp = state.mesh.dp
    share = np.split(rows, dp.size)[dp.rank]
    result = batch_of(share, resolved.config.train.micro_batch, end_id=END, doc_mask=True)
    assert result.starts is not None
    inputs, targets, starts = map(torch.from_numpy, (result.inputs, result.targets, result.starts))
    return DeviceBatch.of(inputs, targets, state.backend.put, starts, state.context_parallel)


def _gradient_and_loss(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], rows: Rows
) -> tuple[Gradient, float]:
    state = start(backend, resolved, weights)
    batch = packed_documents(state, resolved, rows)
    losses, numbers = zip(*eval_step(state, batch), strict=True)
    return gradient(state, batch), float(sum(losses)) / float(sum(numbers))


def hold_documents(ranks: RankPool, resolved: Resolved, random: Random, *, bound: float, flash: bool = False) -> None:
    """Compare gradients and losses of packed documents, by all ranks of a layout, with transformers on each alone."""
    train, parallel = resolved.config.train, resolved.config.parallel
    rows = drawn_rows(random, train.global_batch, train.seq_len, resolved.model.vocab_size)
    weights = weights_of(resolved)
    loss, number, grads = documents_alone(resolved, weights, rows)
    world = parallel.ranks_per_replica * parallel.dp
    result = ranks.run(world, documents_on_rank, resolved, weights, rows, flash)
    for rank, evaluated in result:
        assert rank.num_tokens == number
        assert (rank.loss, evaluated) == pytest.approx((loss, loss), abs=2e-6)
    ours = whole([rank.shards for rank, _ in result], resolved)
    # A query that sees one key weighs it by 1: of documents of one token, queries and keys have gradients of rounding.
    rounding = 1e-6 * max(grad.norm() for grad in grads.values())
    zeros = {name for name, grad in grads.items() if grad.norm() < rounding}
    assert all(ours.pop(name).norm() < rounding for name in zeros), zeros
    errors = relative_errors(ours, {name: grad for name, grad in grads.items() if name not in zeros})
    assert max(errors.values()) < bound, errors


def documents_alone(
    resolved: Resolved, weights: Mapping[str, Tensor], rows: Rows
) -> tuple[float, int, dict[str, Tensor]]:
    """Mean loss, targets and gradients of transformers, which gets one document at a time."""
    model = hf_model(resolved, weights=weights)
    pieces = []
    for row in rows:
        tokens = row[row != IGNORE_INDEX]
        pieces += np.split(tokens & ID_MASK, np.flatnonzero(tokens & END_BIT) + 1)
    documents = [torch.from_numpy(part) for part in pieces]
    number = sum(max(0, len(part) - 1) for part in documents)
    total = 0.0
    for part in documents:
        if len(part) > 1:
            logits = model(input_ids=part[None, :-1]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum") / number
            loss.backward()
            total += loss.item()
    return total, number, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _mean_of_means() -> AbstractContextManager[Any]:
    """The mean over the ranks of the mean over the targets of each.

    Source: NeuronX Distributed Training, `lightning_modules/model/base.py`; the loss of
    https://github.com/axolotl-ai-cloud/axolotl/issues/3608 is 1.84 times too high.
    """

    def sums(loss: Tensor, targets: Tensor) -> Tensor:
        number = (targets != IGNORE_INDEX).sum(dtype=torch.float32)
        return torch.stack([loss.detach() / number, torch.ones(())])

    return patch.object(step, "_sums", sums)


def _targets_shifted_after_the_cut() -> AbstractContextManager[Any]:
    sound = DeviceBatch.of

    def shifted(*args: Any, **kwargs: Any) -> DeviceBatch:
        batch = sound(*args, **kwargs)
        targets = [torch.cat([x[:, 1:], torch.full_like(x[:, :1], IGNORE_INDEX)], dim=1) for x in batch.inputs]
        return DeviceBatch(batch.inputs, targets, batch.starts)

    return patch.object(DeviceBatch, "of", staticmethod(shifted))


def _local_positions_in_the_rotation() -> AbstractContextManager[Any]:
    def local(starts: Tensor, positions: Tensor | None = None) -> Tensor:
        return (torch.arange(starts.shape[1])[:, None] - starts.t()).clamp(min=0)

    return patch.object(attention, "positions_of", local)


@contextmanager
def _stale_block_in_the_backward_ring() -> Iterator[None]:
    """Keys and values of this rank again in place of those that arrive.

    Source: https://github.com/NVIDIA-NeMo/Automodel/pull/3157, of the ring in diffusers.
    """
    shift, backward = C10dCollectives.start_shift, context_parallel._Ring.backward

    def stale(self: C10dCollectives, x: Tensor, axis: Any, hops: int = 1) -> Any:
        shift(self, x, axis, hops).wait()
        return Done(x)

    def backward_with_it(ctx: Any, grad: Tensor) -> Any:
        calls = iter((stale, *[shift] * 100))

        def next_shift(self: C10dCollectives, x: Tensor, axis: Any, hops: int = 1) -> Any:
            return next(calls)(self, x, axis, hops)

        with patch.object(C10dCollectives, "start_shift", next_shift):
            return backward(ctx, grad)

    with patch.object(context_parallel._Ring, "backward", staticmethod(backward_with_it)):
        yield


def _documents_that_see_each_other() -> AbstractContextManager[Any]:
    """Masks of documents dropped without a word.

    Source: https://github.com/huggingface/trl/pull/6843.
    """
    sound = KeyRanges.of

    def of(starts: Tensor, positions: Tensor, window: int | None = None) -> KeyRanges:
        return sound(torch.zeros_like(starts), positions, window)

    return patch.object(KeyRanges, "of", staticmethod(of))


def _no_sight_across_a_cut() -> AbstractContextManager[Any]:
    """Documents that end at each cut, as where a document has to divide between the ranks.

    Source: https://github.com/pytorch/torchtitan/issues/2536.
    """
    sound = ContextParallel.attention

    def attend(self: ContextParallel, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        starts, *window = rest
        begins = positions[0] if starts is None else starts.clamp(min=int(positions[0]))
        return sound(self, q, k, v, positions, begins.expand(q.shape[1], len(positions)), *window)

    return patch.object(ContextParallel, "attention", attend)


def _skipped_block_that_is_visible() -> AbstractContextManager[Any]:
    sound = context_parallel._of_block

    def own_only(ranges: KeyRanges, source: int, context: ContextParallel) -> KeyRanges | None:
        return sound(ranges, source, context) if source == context.axis.rank else None

    return patch.object(context_parallel, "_of_block", own_only)


def _hop_that_a_document_takes_left_out() -> AbstractContextManager[Any]:
    """Each rank gets half of the hops, and all ranks agree."""
    sound = context_parallel.visible_hops

    def shorter(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        hops = sound(*args, **kwargs)
        return hops[: (len(hops) + 1) // 2]

    return patch.object(context_parallel, "visible_hops", shorter)


@contextmanager
def _sums_of_a_block_in_its_backward() -> Iterator[None]:
    """The sums of a block's own weights in place of those of all keys."""

    def local(sound: Any) -> Any:
        def backward(self: Kernels, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> Any:
            _, ranges = rest
            return sound(self, grad, q, k, v, out, self.attend(q, k, v, ranges)[1], ranges)

        return backward

    with (
        patch.object(PlainKernels, "attend_backward", local(PlainKernels.attend_backward)),
        patch.object(FlashOnCpu, "attend_backward", local(FlashOnCpu.attend_backward)),
    ):
        yield


def _gradient_of_own_keys_only() -> AbstractContextManager[Any]:
    """Gradients of keys and values from the own queries alone, without those that other ranks have."""

    def own(self: Any, x: Tensor, axis: Any) -> Tensor:
        part: Tensor = x.chunk(axis.size)[axis.rank]
        return part.clone()

    return patch.object(C10dCollectives, "reduce_scatter", own)


MUTANTS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "mean of means": ("gather", _mean_of_means),
    "targets shifted after the cut": ("ring", _targets_shifted_after_the_cut),
    "local positions in the rotation": ("gather", _local_positions_in_the_rotation),
    "stale block in the backward ring": ("ring", _stale_block_in_the_backward_ring),
    "documents that see each other": ("ring", _documents_that_see_each_other),
    "no sight across a cut": ("gather", _no_sight_across_a_cut),
    "skipped block that is visible": ("ring", _skipped_block_that_is_visible),
    "hop that a document takes left out": ("ring", _hop_that_a_document_takes_left_out),
    "sums of a block in its backward": ("ring", _sums_of_a_block_in_its_backward),
    "gradient of own keys only": ("gather", _gradient_of_own_keys_only),
}
"""Method of the exchange, and the defect."""


def documents_with_mutant(backend: Backend, name: str, *args: Any) -> tuple[Gradient, float]:
    """`documents_on_rank` with a defect."""
    _, mutant = MUTANTS[name]
    with mutant():
        return documents_on_rank(backend, *args)


SEED, CASES = 0, 10


def drawn_layout(random: Random, index: int) -> Resolved:
    """A layout of at most four ranks; the first ones have each schedule, interleaved stages, and further axes."""
    pp, tp, dp = [(2, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)][index % 5]
    schedule = "zero_bubble" if index in (1, 3) else "1f1b"
    virtual_pp = 1 if schedule == "zero_bubble" else [2, 1][index % 2]
    micro = random.choice((1, 2))
    layers = random.randint(pp * virtual_pp, pp * virtual_pp + 1)
    return layout(
        random.choice(("mha", "gqa2", "tied", "llama3-rope")),
        pp=pp,
        tp=tp,
        dp=dp,
        virtual_pp=virtual_pp,
        schedule=schedule,
        micro=micro,
        batch=micro * dp * random.randint(1, 4),
        remat=random.choice(("none", "selective", "full")),
        config={"num_hidden_layers": layers},
    )


@pytest.mark.parametrize("index", range(CASES))
def test_documents_of_a_drawn_layout_with_stages_are_those_of_transformers(ranks: RankPool, index: int) -> None:
    random = Random(SEED + index)
    hold_documents(ranks, drawn_layout(random, index), random, bound=5e-6)
