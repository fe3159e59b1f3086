"""Order of gathering parameters, passes and reductions of units, under `torch.distributed.fsdp`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.tools.trace.step_trace import record_events
from nxtrain.train.step import train_step
from tests.support.models import changed, weights_of
from tests.support.parity import batches, layout, local_batch, start
from tests.support.ranks import RankPool

BLOCKS = 6


def events_of_a_step(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> list[str]:
    """Events of the second step, in order; the first makes groups and hooks."""
    state = start(backend, resolved, weights)
    log = record_events(state.model)
    for batch in batches(resolved, 2):
        log.clear()
        train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), 1e-3)
    return log


def events(resolved: Resolved, ranks: RankPool) -> list[str]:
    """Of a step on all ranks, which agree."""
    first, *others = ranks.run(resolved.config.parallel.dp, events_of_a_step, resolved, weights_of(resolved))
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


def expected(
    *, forward_ahead: int, backward_ahead: int, again: bool, kind: str = "before", blocks: int = 1
) -> list[str]:
    """Events of a step with so many units gathered ahead of their use."""
    units = [range(first, first + blocks) for first in range(0, BLOCKS, blocks)]
    last = len(units) - 1
    names = [*(str(unit[0]) for unit in units), "head"]
    actual = ["gather rest", "gather embedding", *(f"gather {name}" for name in names[:forward_ahead])]
    gathered = min(forward_ahead, len(names)) - 1
    for index, unit in enumerate(units):
        wanted = min(index + forward_ahead, last + 1)
        actual += [f"gather {names[other]}" for other in range(gathered + 1, wanted + 1)]
        actual += [f"forward {block}" for block in unit]
        gathered = max(gathered, wanted)
    actual += [f"gather {name}" for name in names[gathered + 1 :]]
    gathered = last + 1
    if kind != "none" and again:
        gathered = max(0, last + 1 - backward_ahead)
        actual += [f"gather {names[other]}" for other in range(last, gathered - 1, -1)]
    actual.append("reduce head")
    for index, unit in reversed([*enumerate(units)]):
        ahead = max(0, index - backward_ahead)
        steps = {"before": (ahead, ahead), "after": (index, ahead), "none": (index, index)}[kind]
        passes = [[f"backward {block}" for block in reversed(unit)], [f"reduce {unit[0]}"]]
        for wanted, events in zip(steps, passes, strict=True):
            if again:
                actual += [f"gather {units[other][0]}" for other in range(gathered - 1, wanted - 1, -1)]
                gathered = min(gathered, wanted)
            actual += events
    return [*actual, "reduce rest", "reduce embedding"]


def sharded(shard: str, dp: int, micro: int = 0, **parallel: Any) -> Resolved:
    size = 2 if shard == "hybrid" else 0
    config = {"num_hidden_layers": BLOCKS}
    resolved = layout("gqa2", tp=1, dp=dp, micro=micro or 4 // dp, shard=shard, shard_size=size, config=config)
    return changed(resolved, parallel=parallel)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize(("shard", "dp"), [("full", 2), ("grad_op", 2), ("hybrid", 4)])
def test_blocks_are_gathered_ahead_by_as_many_as_are_configured(
    ranks: RankPool, shard: str, dp: int, prefetch: int
) -> None:
    # torch itself gathers one block ahead backward, and none forward.
    want = expected(forward_ahead=prefetch, backward_ahead=max(1, prefetch), again=shard != "grad_op")
    assert events(sharded(shard, dp, prefetch=prefetch), ranks) == want


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize(("kind", "prefetch"), [("before", 2), ("after", 1), ("after", 2), ("none", 2)])
def test_each_direction_gathers_ahead_as_it_is_configured(
    ranks: RankPool, kind: str, prefetch: int, forward: bool
) -> None:
    resolved = sharded("full", 2, prefetch=prefetch, forward_prefetch=forward, backward_prefetch=kind)
    ahead = prefetch if forward else 0
    assert events(resolved, ranks) == expected(forward_ahead=ahead, backward_ahead=prefetch, again=True, kind=kind)


@pytest.mark.parametrize("kind", ["before", "after", "none"])
def test_adjacent_blocks_below_the_least_number_of_parameters_are_one_unit(ranks: RankPool, kind: str) -> None:
    resolved = sharded("full", 2, backward_prefetch=kind)
    (block,) = {sum(p.numel() for p in weights_of_block(resolved, index)) for index in range(BLOCKS)}
    resolved = changed(resolved, parallel={"unit_params": block + 1})
    want = expected(forward_ahead=1, backward_ahead=1, again=True, kind=kind, blocks=2)
    assert events(resolved, ranks) == want


def weights_of_block(resolved: Resolved, index: int) -> list[Tensor]:
    return [weight for name, weight in weights_of(resolved).items() if f".layers.{index}." in name]


def test_every_micro_batch_gathers_alike(ranks: RankPool) -> None:
    want = expected(forward_ahead=2, backward_ahead=2, again=True)
    assert events(sharded("full", 2, micro=1, prefetch=2), ranks) == want * 2
