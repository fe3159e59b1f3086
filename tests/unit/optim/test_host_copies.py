"""An update of host copies is that of the parameters themselves, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.optim.adamw import AdamW
from nxtrain.optim.host_copies import HostCopies
from nxtrain.parallel.precision import Update
from tests.support.adamw import LAYOUT, RULE, SCALE, first, grads_of, host, precision
from tests.unit.optim.test_skipping import RULES

WIDE_FROM = 3
"""First step, counted from 0, whose gradients are float32 for parameters of any type."""


def course(update: Update, params: torch.dtype, state: torch.dtype, *, copied: bool) -> dict[str, Tensor]:
    """Parameters and state after updates, one of them skipped, and after weights from elsewhere.

    The gradients of the first steps have the type of the parameters, as of one micro-batch. Later ones are float32, as
    sums of several micro-batches in the later stages of a ramp.
    """
    shards = {name: p.detach() for name, p in first(params).items()}
    copies = HostCopies(shards) if copied else None
    types, rule = precision(params, update, state), RULE.model_copy(update={"ema_decay": 0.9})
    adamw = AdamW(shards, LAYOUT, CpuKernels(), host, precision=types, seed=0, optim=rule, host_copies=copies)
    for step in range(4):
        if step == 2:
            for shard in shards.values():
                shard.mul_(0.5)
            adamw.reset()
        skip = torch.tensor(step == 1)
        grads = grads_of(step, params if step < WIDE_FROM else torch.float32)
        adamw.step(grads, torch.tensor(1e-2), torch.tensor(SCALE), skip)
    result = {f"{kind} {name}": x for kind, item in adamw.state.items() for name, x in item.items()}
    return {**shards, **result}


@pytest.mark.parametrize(("update", "params", "state"), RULES, ids=str)
def test_copies_change_no_bit(update: Update, params: torch.dtype, state: torch.dtype) -> None:
    expected = course(update, params, state, copied=False)
    for name, x in course(update, params, state, copied=True).items():
        assert torch.equal(x, expected[name]), name


def test_memory_is_pinned_as_long_as_the_copies_exist() -> None:
    pinned: dict[int, int] = {}
    released: list[int] = []

    def pin(memory: Tensor) -> Callable[[], None]:
        pinned[memory.data_ptr()] = memory.nbytes
        return partial(released.append, memory.data_ptr())

    shards = {name: p.detach() for name, p in first(torch.bfloat16).items()}
    shards["norm"] = shards["norm"].float()
    copies = HostCopies(shards, pin)
    grads = copies.fetch(grads_of(0, torch.bfloat16), shards)
    wanted = [sum(x.nbytes for x in given.values()) for given in (shards, grads)]
    assert list(pinned.values()) == wanted
    for name, x in shards.items():
        assert torch.equal(copies.params[name], x) and torch.equal(grads[name], grads_of(0, torch.bfloat16)[name])
    narrow = list(pinned)[1]  # `grads` keeps this memory, so that no other gets its address
    wide = copies.fetch(grads_of(0, torch.float32), shards)
    assert released == [narrow], "memory of narrow gradients is freed once they are wide"
    assert list(pinned.values())[2:] == [sum(x.nbytes for x in wide.values())]
    del copies
    assert sorted(released) == sorted(pinned)
