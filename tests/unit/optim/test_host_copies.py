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


def course(update: Update, params: torch.dtype, state: torch.dtype, *, copied: bool) -> dict[str, Tensor]:
    """Parameters and state after updates, one of them skipped, and after weights from elsewhere."""
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
        adamw.step(grads_of(step, params), torch.tensor(1e-2), torch.tensor(SCALE), skip)
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
    del copies
    assert sorted(released) == sorted(pinned)
