"""Order of gathering the parameters of blocks and of their passes, under `torch.distributed.fsdp`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.family import CausalLM
from nxtrain.train.step import train_step
from tests.support.models import changed, weights_of
from tests.support.parity import batches, layout, local_batch, start
from tests.support.ranks import RankPool

BLOCKS = 5


class _Gathering:
    """An all-gather that writes down which unit it gathers."""

    def __init__(self, unit: str, log: list[str]) -> None:
        self._unit, self._log = unit, log

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._log.append(f"gather {self._unit}")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _Backward(torch.autograd.Function):
    """Identity whose backward writes a word down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], word: str) -> Tensor:
        ctx.note = lambda: log.append(word)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.note()
        return grads[0], None, None


def events_of_a_step(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> list[str]:
    """Events of the second step, in order; the first makes groups and hooks."""
    state = start(backend, resolved, weights)
    log: list[str] = []
    _record(state.model, "rest", log)
    model: CausalLM = state.model  # type: ignore[assignment]
    for index, block in enumerate(model.blocks):
        _record(block, str(index), log)

        def forward(module: nn.Module, args: Any, index: int = index) -> None:
            log.append(f"forward {index}")

        def backward(module: nn.Module, args: Any, out: Tensor, index: int = index) -> Any:
            return _Backward.apply(out, log, f"backward {index}")

        block.register_forward_pre_hook(forward)  # after that of FSDP, which has gathered by then
        block.register_forward_hook(backward, prepend=True)  # inside that of FSDP, whose gathering comes first backward
    for batch in batches(resolved, 2):
        log.clear()
        train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), 1e-3)
    return log


def _record(module: nn.Module, unit: str, log: list[str]) -> None:
    assert isinstance(module, FSDPModule)
    module.set_custom_all_gather(_Gathering(unit, log))  # type: ignore[arg-type]


def events(resolved: Resolved, ranks: RankPool) -> list[str]:
    """Of a step on all ranks, which agree."""
    first, *others = ranks.run(resolved.config.parallel.dp, events_of_a_step, resolved, weights_of(resolved))
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


def expected(*, forward_ahead: int, backward_ahead: int, again: bool) -> list[str]:
    """Events of a step with so many blocks gathered ahead of their use.

    Args:
        forward_ahead, backward_ahead: Blocks.
        again: Blocks were dropped after the forward pass, and are gathered for the backward pass.
    """
    found, gathered = ["gather rest"], -1
    for index in range(BLOCKS):
        wanted = min(index + forward_ahead, BLOCKS - 1)
        found += [f"gather {other}" for other in range(gathered + 1, wanted + 1)] + [f"forward {index}"]
        gathered = max(gathered, wanted)
    gathered = BLOCKS
    for index in reversed(range(BLOCKS)):
        wanted = max(0, index - backward_ahead)
        if again:
            found += [f"gather {other}" for other in range(gathered - 1, wanted - 1, -1)]
            gathered = min(gathered, wanted)
        found.append(f"backward {index}")
    return found


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize(("shard", "dp"), [("full", 2), ("grad_op", 2), ("hybrid", 4)])
def test_blocks_are_gathered_ahead_by_as_many_as_are_configured(
    ranks: RankPool, shard: str, dp: int, prefetch: int
) -> None:
    config = {"num_hidden_layers": BLOCKS}
    size = 2 if shard == "hybrid" else 0
    resolved = layout("gqa2", tp=1, dp=dp, micro=4 // dp, shard=shard, shard_size=size, config=config)
    resolved = changed(resolved, parallel={"prefetch": prefetch})
    # torch itself gathers one block ahead backward, and none forward.
    want = expected(forward_ahead=prefetch, backward_ahead=max(1, prefetch), again=shard != "grad_op")
    assert events(resolved, ranks) == want


def test_every_micro_batch_gathers_alike(ranks: RankPool) -> None:
    config = {"num_hidden_layers": BLOCKS}
    resolved = layout("gqa2", tp=1, dp=2, micro=1, shard="full", config=config)
    resolved = changed(resolved, parallel={"prefetch": 2})
    want = expected(forward_ahead=2, backward_ahead=2, again=True)
    assert events(resolved, ranks) == want * 2
