"""When the ranks of a pipeline do what their schedule says, given what everything takes: simulated, not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nxtrain.parallel.schedule import Action


class Span(NamedTuple):
    """When a rank does something. A transfer begins when its ends are ready, so that waiting is what lies between."""

    rank: int
    action: Action
    start_s: float
    end_s: float


def play(
    actions: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: float = 0.0,
    *,
    weight_s: Sequence[float] = (),
    blocking: bool = True,
) -> tuple[Span, ...]:
    """Time a schedule, each rank doing its actions in order.

    Args:
        actions: What each rank does, in order.
        forward_s, backward_s: What each virtual stage takes.
        transfer_s: What a transfer takes.
        weight_s: What the weight part of each virtual stage's backward takes, where a schedule splits backwards.
        blocking: Whether transfers begin when both ends come to them and keep both busy, as collectives of two ranks
            do. Else the sender goes on at once, and the receiver waits until `transfer_s` later.

    Raises:
        AssertionError: The ranks wait for each other; it says which for what.
    """
    pp_size = len(actions)
    costs_s = {"forward": forward_s, "backward": backward_s, "weight": weight_s}
    position, free_s = [0] * pp_size, [0.0] * pp_size
    arrival_s: dict[tuple[int, Action], float] = {}  # of what was sent and not yet received
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
            do(rank, action, start_s, start_s + costs_s[action.kind][action.chunk * pp_size + rank])
            return True
        other, theirs = action.other_end(rank, pp_size)
        if blocking:
            if head(other) != theirs:
                return False
            start_s = max(start_s, free_s[other])
            do(rank, action, start_s, start_s + transfer_s)
            do(other, theirs, start_s, start_s + transfer_s)
        elif action.kind.startswith("send"):
            arrival_s[other, theirs] = start_s + transfer_s
            do(rank, action, start_s, start_s)
        elif (rank, action) not in arrival_s:
            return False
        else:
            end_s = max(start_s, arrival_s.pop((rank, action)))
            do(rank, action, max(start_s, end_s - transfer_s), end_s)
        return True

    moves = True
    while moves:
        moves = False
        for rank in range(pp_size):
            while (action := head(rank)) and go_on(rank, action):
                moves = True
    waiting = {rank: action for rank in range(pp_size) if (action := head(rank))}
    assert not waiting, "the ranks wait for each other: " + ", ".join(
        f"rank {rank} at {action} for rank {action.other_end(rank, pp_size)[0]}" for rank, action in waiting.items()
    )
    return tuple(spans)
