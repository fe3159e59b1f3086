"""The pipeline schedules of NeuronX Distributed's own scheduler, in words that any schedule can be compared in."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward"]

_KINDS: dict[str, Kind] = {
    "ForwardStepTask": "forward",
    "BackwardStepTask": "backward",
    "ForwardPreprocessTask": "receive_forward",
    "ForwardPostprocessTask": "send_forward",
    "BackwardPreprocessTask": "receive_backward",
    "BackwardPostprocessTask": "send_backward",
}


class Action(NamedTuple):
    """One thing that a rank does.

    Args:
        kind: What; a forward transfer is of activations, a backward one of their gradients.
        chunk: The acting rank's own, that computes, or whose input, output or gradient of either is moved.
        micro: Micro-batch.
    """

    kind: Kind
    chunk: int
    micro: int


class Transfer(NamedTuple):
    """Transfer between two stages, described alike by both ends.

    Args:
        sender, receiver: Ranks.
        stage: Of the sender, counted through all chunks.
        micro: Micro-batch.
    """

    sender: int
    receiver: int
    stage: int
    micro: int


def actions(num_ranks: int, num_micro: int, rank: int, num_chunks: int = 1) -> list[Action]:
    """Actions of a rank in a step, in the order of `NxDPPModel`.

    Its 1F1B receives as late and sends as early as it can; its interleaved schedule sends and receives after each
    computation, in an order that depends on whether there are as many micro-batches as ranks.

    Args:
        num_ranks, num_micro, num_chunks: Degree of pipeline parallelism, micro-batches per step, stages per rank.
        rank: Of the pipeline.

    Raises:
        ValueError: Interleaving, and `num_ranks` does not divide `num_micro`.

    Source: neuronx_distributed/pipeline/scheduler.py; create_schedule and _exec_schedule of pipeline/model.py.
    """
    scheduler = _scheduler()
    if num_chunks == 1:
        schedule = scheduler.Train1F1BSchedule(num_micro, num_ranks, rank)
    else:
        schedule = scheduler.TrainInterleavedSchedule(
            num_micro, num_chunks, num_ranks, rank, use_odd_even_scheduler=num_micro == num_ranks
        )
    tasks = [task for step in schedule.steps() for task in step if type(task).__name__ in _KINDS]
    said = [Action(_KINDS[type(task).__name__], task.model_chunk, task.mb) for task in tasks]
    # Before its first stage it fetches the batch, and behind its last it returns, where others receive and send.
    return [action for action in said if is_compute(action) or _exists(action, rank, num_ranks, num_chunks)]


def is_compute(action: Action) -> bool:
    """True if nothing is moved."""
    return action.kind in ("forward", "backward")


def transfer(action: Action, rank: int, num_ranks: int) -> Transfer:
    """Transfer of a rank in an action."""
    there = 1 if action.kind in ("send_forward", "receive_backward") else -1
    stage, peer = action.chunk * num_ranks + rank, (rank + there) % num_ranks
    if action.kind.startswith("send"):
        return Transfer(rank, peer, stage, action.micro)
    return Transfer(peer, rank, stage + there, action.micro)


def stuck(schedules: Sequence[Sequence[Action]]) -> dict[int, Action]:
    """Actions at which ranks deadlock if each transfer waits for its other end.

    Args:
        schedules: Of all ranks.
    """
    num_ranks = len(schedules)
    at = [0] * num_ranks
    while True:
        heads: dict[int, Transfer] = {}
        for rank, schedule in enumerate(schedules):
            while at[rank] < len(schedule) and is_compute(schedule[at[rank]]):
                at[rank] += 1
            if at[rank] < len(schedule):
                heads[rank] = transfer(schedule[at[rank]], rank, num_ranks)
        met = [rank for rank, head in heads.items() if heads.get(head.sender) == heads.get(head.receiver) == head]
        if not met:
            return {rank: schedules[rank][at[rank]] for rank in heads}
        for rank in met:
            at[rank] += 1


def _exists(action: Action, rank: int, num_ranks: int, num_chunks: int) -> bool:
    stage = action.chunk * num_ranks + rank
    if action.kind in ("receive_forward", "send_backward"):
        return stage > 0
    return stage < num_chunks * num_ranks - 1


@cache
def _scheduler() -> Any:
    """The module alone: it needs nothing, where its package needs torch-xla."""
    package = importlib.util.find_spec("neuronx_distributed")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "pipeline" / "scheduler.py"
    module = types.ModuleType("nxd_scheduler")
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), vars(module))
    return module
