"""The memory of a rank on a device that computes while the host goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nxtrain.checkpoint.meta import Meta
from nxtrain.train.health.numerics import Reading
from nxtrain.train.rank_memory import RankMemory
from nxtrain.train.step import StepResult


def test_numbers_of_the_next_step_are_not_those_of_the_memory() -> None:
    """A step notes its norm before its update, and on a device with the sums of an aborted wait."""
    reads: list[str] = []
    history, weight = torch.zeros(3), torch.ones(2)
    sections: list[Any] = []

    def fetch(values: dict[str, Tensor]) -> dict[str, float]:
        reads.extend(values)
        return {}

    state: Any = SimpleNamespace(
        backend=SimpleNamespace(is_asynchronous=True, fetch=fetch),
        counters={"history": history},
        optimizer=SimpleNamespace(num_updates=torch.zeros(2)),
        section=lambda name: None,
        reporting=sections.append,
    )
    meta = Meta.model_construct(step=1)
    checkpoints = SimpleNamespace(shards=lambda: {"model": {"w": weight}}, meta_at=lambda *_: meta, saved_step=0)
    guard = SimpleNamespace(kept=dict, reading=Reading(1))
    run: Any = SimpleNamespace(state=state, guard=guard, checkpoints=checkpoints, initial_norm=None)
    memory = RankMemory(is_kept=True)
    memory.watch(run, 0)
    history += 1
    memory.updated(1, StepResult(weight, weight, weight))
    history += 100
    memory.detach()
    assert memory.standing is not None
    assert torch.equal(memory.numbers(is_finished=False).counters["history"], torch.ones(3))
    assert reads == []
    sections[0]("optimizer")
    assert reads == ["num_updates"], "the update waits for the sums"
    assert memory.standing is None
