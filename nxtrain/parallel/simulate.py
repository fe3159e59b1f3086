"""Simulated timeline of a pipeline schedule, from given durations of computations and transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from nxtrain.parallel.schedule import Action, Kind


class Span(NamedTuple):
    """Simulated start and end of an action on a rank, in seconds.

    A transfer begins when both of its ends are ready, so gaps between spans are waits.
    """

    rank: int
    action: Action
    start_s: float
    end_s: float


def simulate(
    actions: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: float = 0.0,
    *,
    weight_s: Sequence[float] = (),
    blocking: bool = True,
) -> tuple[Span, ...]:
    """Simulate the timeline of a pipeline schedule, in which each rank runs its actions in order.

    Args:
        actions: Actions of each rank, in order.
        forward_s, backward_s: Seconds of the forward and the backward of each virtual stage.
        transfer_s: Seconds of a transfer.
        weight_s: Seconds of each virtual stage's weight gradients, for schedules that split backwards.
        blocking: If True, a transfer begins when both ends reach it and keeps both busy, like a collective of two
            ranks. If False, both ends continue at once, and a computation from a received tensor starts at least
            `transfer_s` after the send.

    Raises:
        AssertionError: The ranks deadlock; the message names each rank and its action.
    """
    pp_size = len(actions)
    costs_s = {"forward": forward_s, "backward": backward_s, "weight": weight_s}
    position, free_s = [0] * pp_size, [0.0] * pp_size
    arrival_s: dict[tuple[int, Action], float] = {}  # arrival of each sent tensor, by receiving rank and receive
    asked: set[tuple[int, Action]] = set()  # receives that were started
    spans = []

    def head(rank: int) -> Action | None:
        return actions[rank][position[rank]] if position[rank] < len(actions[rank]) else None

    def do(rank: int, action: Action, start_s: float, end_s: float) -> None:
        spans.append(Span(rank, action, start_s, end_s))
        position[rank] += 1
        free_s[rank] = end_s

    def go_on(rank: int, action: Action) -> bool:
        start_s = free_s[rank]
        if not action.is_transfer:
            if (rank, _input(action)) in asked:
                if (rank, _input(action)) not in arrival_s:
                    return False
                start_s = max(start_s, arrival_s[rank, _input(action)])
            do(rank, action, start_s, start_s + costs_s[action.kind][action.chunk * pp_size + rank])
            return True
        other, theirs = action.other_end(rank, pp_size)
        if blocking:
            if head(other) != theirs:
                return False
            start_s = max(start_s, free_s[other])
            do(rank, action, start_s, start_s + transfer_s)
            do(other, theirs, start_s, start_s + transfer_s)
        else:
            if action.is_send:
                arrival_s[other, theirs] = start_s + transfer_s
            else:
                asked.add((rank, action))
            do(rank, action, start_s, start_s)
        return True

    moves = True
    while moves:
        moves = False
        for rank in range(pp_size):
            action = head(rank)
            while action is not None and go_on(rank, action):
                moves = True
                action = head(rank)
    waiting = []
    for rank in range(pp_size):
        action = head(rank)
        if action is not None:
            waiting.append(f"rank {rank} at {action} for rank {_input(action).other_end(rank, pp_size)[0]}")
    assert not waiting, f"the ranks wait for each other: {', '.join(waiting)}"
    return tuple(spans)


def _input(action: Action) -> Action:
    """Receive action that provides a computation's input; a transfer is returned unchanged."""
    kinds: dict[Kind, Kind] = {"forward": "receive_forward", "backward": "receive_backward"}
    return replace(action, kind=kinds.get(action.kind, action.kind))
