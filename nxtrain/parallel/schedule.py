"""Schedules of pipeline parallelism: the order of computations and transfers on each rank, as pure functions.

A model is split into `pp_size * virtual_pp` virtual stages. Each rank holds `virtual_pp` chunks; chunk c of rank r is
virtual stage `c * pp_size + r`. The output of a virtual stage goes to the next stage on the next rank, and from the
last rank back to the first.

Ranks compute in the order of 1F1B, or of interleaved 1F1B with several chunks. A transfer may block both ends: on XLA
it is a collective of two ranks, on NCCL a kernel in the order of a stream. So the positions of transfers between the
computations decide whether the ranks can deadlock.

These schedules cannot deadlock, by construction. One simulation of all ranks gives one order of all events, in which a
transfer is a single event after its producer and before its consumer. Each rank runs its own events in that order. At
any time the earliest event that has not happened is the next event of every rank that takes part in it, so it can
happen. For the same reason both ends of a pair have their transfers, of activations and of gradients, in the same
order.

With one chunk each, ranks may also compute in the order of ZB-H1, which splits a backward in two. The gradients of a
stage's input are computed and sent first. The weight gradients are computed when no other rank waits.

Source: Narayanan et al. 2021 (arXiv:2104.04473) section 2.2; Qi et al. 2024 (arXiv:2401.10241) section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal[
    "forward", "backward", "weight", "send_forward", "receive_forward", "send_backward", "receive_backward"
]

Order: TypeAlias = Literal["1f1b", "zero_bubble"]
"""Order of the computations of a step, as in `parallel.schedule`."""

_OTHER_END: dict[Kind, Kind] = {
    "send_forward": "receive_forward",
    "receive_forward": "send_forward",
    "send_backward": "receive_backward",
    "receive_backward": "send_backward",
}
_SHORT: dict[Kind, str] = {
    "forward": "F{}",
    "backward": "B{}",
    "weight": "W{}",
    "send_forward": "F{}>",
    "receive_forward": ">F{}",
    "send_backward": "B{}>",
    "receive_backward": ">B{}",
}


@dataclass(frozen=True, slots=True)
class Action:
    """Action of a pipeline rank, written `F3` for the forward of micro-batch 3, or `F3.1` for the same on chunk 1.

    `B3` is the backward of micro-batch 3. In a split backward, `B3` computes the gradients of the input, for which
    another rank waits, and `W3` computes the weight gradients.

    `>F3` receives the input of `F3`, and `F3>` sends the output of `F3`. `>B3` receives the gradients of that output,
    and `B3>` sends the gradients of the input.

    Args:
        kind: Kind of action.
        chunk: Index of the acting rank's chunk, from 0.
        micro: Micro-batch, from 0.
    """

    kind: Kind
    chunk: int
    micro: int

    def __str__(self) -> str:
        return _SHORT[self.kind].format(f"{self.micro}.{self.chunk}" if self.chunk else self.micro)

    @property
    def is_transfer(self) -> bool:
        """True for an action that sends or receives a tensor."""
        return self.kind in _OTHER_END

    @property
    def is_send(self) -> bool:
        """True for an action that sends a tensor."""
        return self.kind in ("send_forward", "send_backward")

    def other_end(self, rank: int, pp_size: int) -> tuple[int, Action]:
        """Rank at the other end of a transfer of `rank`, and the other rank's action."""
        step = 1 if self.kind in ("send_forward", "receive_backward") else -1
        chunk, other = divmod(self.chunk * pp_size + rank + step, pp_size)
        return other, Action(_OTHER_END[self.kind], chunk, self.micro)


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]
"""Pipeline schedule: the actions of each rank, in order."""


@lru_cache(maxsize=64)
def schedule(pp_size: int, virtual_pp: int, num_micro: int, order: Order = "1f1b") -> Schedule:
    """Schedule of a training step: 1F1B, interleaved 1F1B if ranks have several chunks, or ZB-H1.

    Args:
        pp_size: Number of pipeline ranks.
        virtual_pp: Model chunks of each rank; must be 1 for a single rank, which has nothing to interleave.
        num_micro: Number of micro-batches of the step; any number, also one that `pp_size` does not divide.
        order: Order of computations; `zero_bubble` needs `virtual_pp=1`.
    """
    forwards = _in_groups("forward", pp_size, virtual_pp, num_micro)
    backwards = _in_groups("backward", pp_size, virtual_pp, num_micro)
    orders = []
    for rank in range(pp_size):
        warmup = num_warmup(pp_size, virtual_pp, num_micro, rank)
        alternating = list(chain.from_iterable(zip(forwards[warmup:], backwards, strict=False)))
        orders.append(forwards[:warmup] + alternating + backwards[len(forwards) - warmup :])
    if order == "1f1b":
        return _with_transfers(orders)
    assert virtual_pp == 1, f"ZB-H1 has one chunk for each rank, not {virtual_pp}"
    return _with_transfers([_split(actions, rank) for rank, actions in enumerate(orders)])


@lru_cache(maxsize=64)
def evaluation_schedule(pp_size: int, virtual_pp: int, num_micro: int) -> Schedule:
    """Pipeline schedule of an evaluation, which has only forwards; arguments as in `schedule`."""
    return _with_transfers([_in_groups("forward", pp_size, virtual_pp, num_micro)] * pp_size)


@lru_cache(maxsize=64)
def with_exchanges(actions: Schedule) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """Join adjacent sends and receives between the same two ranks, so that one collective carries both directions.

    Args:
        actions: Actions of each rank, in order.

    Returns:
        The same actions, each alone or joined with the next; both ends of a pair join the same transfers.
    """
    positions = [dict(zip(of_rank, range(len(of_rank)), strict=True)) for of_rank in actions]

    def is_exchange(rank: int, first: Action, second: Action) -> bool:
        if not (first.is_transfer and second.is_transfer) or first.is_send == second.is_send:
            return False
        other, theirs = first.other_end(rank, len(actions))
        same, next_theirs = second.other_end(rank, len(actions))
        return other == same and positions[other][next_theirs] == positions[other][theirs] + 1

    joined = []
    for rank, of_rank in enumerate(actions):
        steps: list[tuple[Action, ...]] = []
        for action in of_rank:
            if steps and len(steps[-1]) == 1 and is_exchange(rank, steps[-1][0], action):
                steps[-1] = (steps[-1][0], action)
            else:
                steps.append((action,))
        joined.append(tuple(steps))
    return tuple(joined)


def num_warmup(pp_size: int, virtual_pp: int, num_micro: int, rank: int) -> int:
    """Number of forwards that a rank runs before it alternates forwards and backwards.

    One more micro-batch than this number is in flight at most.
    """
    distance = pp_size - 1 - rank  # from the last rank, whose backwards are the first
    if virtual_pp == 1:
        return min(distance, num_micro)
    return min(2 * distance + (virtual_pp - 1) * group_sizes(pp_size, num_micro)[0], virtual_pp * num_micro)


def group_sizes(pp_size: int, num_micro: int) -> list[int]:
    """Sizes of the groups of micro-batches that a rank runs through one chunk before the next chunk.

    A group is as small as possible while all ranks stay busy. In a group of `pp_size`, the first micro-batch returns to
    the first rank when that rank has finished the last micro-batch. In a smaller group it would return too late. So a
    remainder makes some groups larger, and no group smaller. The groups equal those of `torch.distributed.pipelining`
    where it accepts `num_micro`, and those of Megatron-LM, which requires a multiple of `pp_size`.
    """
    num_groups = max(1, num_micro // pp_size)
    size, rest = divmod(num_micro, num_groups)
    return [size + 1] * rest + [size] * (num_groups - rest)


def _in_groups(kind: Kind, pp_size: int, virtual_pp: int, num_micro: int) -> list[Action]:
    """Forwards or backwards of a rank in the order of (interleaved) 1F1B; equal on every rank."""
    assert pp_size > 0 and virtual_pp > 0 and num_micro > 0, (pp_size, virtual_pp, num_micro)
    assert pp_size > 1 or virtual_pp == 1, f"{virtual_pp} chunks of one rank: there is nothing to interleave"
    chunks = range(virtual_pp) if kind == "forward" else range(virtual_pp - 1, -1, -1)
    actions, start = [], 0
    for size in group_sizes(pp_size, num_micro):
        micros = range(start, start + size)
        actions += [Action(kind, chunk, micro) for chunk, micro in product(chunks, micros)]
        start += size
    return actions


def _split(actions: Sequence[Action], rank: int) -> list[Action]:
    """Split the backwards of 1F1B as in ZB-H1: rank r delays r weight gradients, to fill its idle time at the end.

    Source: Qi et al. 2024 (arXiv:2401.10241) section 2.1, as `torch.distributed.pipelining` counts them.
    """
    order: list[Action] = []
    weights = [Action("weight", action.chunk, action.micro) for action in actions if action.kind == "backward"]
    for action in actions:
        order.append(action)
        if action.kind == "backward" and action.micro >= rank:
            order.append(weights[action.micro - rank])
    return order + weights[max(0, len(weights) - rank) :]


def _with_transfers(orders: Sequence[Sequence[Action]]) -> Schedule:
    """Place transfers between computations so that ranks wait least when each transfer blocks both ends.

    All ranks are simulated. A forward takes 1 unit of time, and a backward 2, or 1 for each half of a split backward. A
    ready output is transferred as soon as both ranks are between computations. No rank that can compute waits for a
    transfer. If outputs were sent as soon as they are ready, the ranks of an interleaved schedule would wait for each
    other all the time.
    """
    splits = any(action.kind == "weight" for action in orders[0])
    takes = {"forward": 1, "backward": 1 if splits else 2, "weight": 1}
    pp_size, num_stages = len(orders), len(orders) * len({action.chunk for action in orders[0]})
    lists: list[list[Action]] = [[] for _ in orders]
    todo = [list(reversed(order)) for order in orders]
    ready = {(0, action) for action in orders[0] if action.kind == "forward" and action.chunk == 0}
    outputs: list[tuple[int, Action]] = []  # sends that have not happened, with the sending rank
    busy: dict[int, tuple[int, Action]] = {}  # the ranks that compute: end of the action, and the action
    now = 0

    def turn(output: tuple[int, Action]) -> tuple[bool, int]:
        # Pairs 0-1, 2-3 and so on come before 1-2, 3-4: half of all pairs transfer at once, not one after another.
        rank, send = output
        lower = rank if send.kind == "send_forward" else (rank - 1) % pp_size
        return lower % 2 == 1, lower

    while any(todo) or outputs or busy:
        for rank in [rank for rank, (end, _) in busy.items() if end == now]:
            _, done = busy.pop(rank)
            stage = done.chunk * pp_size + rank
            if done.kind == "forward" and stage + 1 == num_stages:
                ready.add((rank, Action("backward", done.chunk, done.micro)))
            elif done.kind == "forward":
                outputs.append((rank, Action("send_forward", done.chunk, done.micro)))
            elif done.kind == "backward":
                ready.add((rank, Action("weight", done.chunk, done.micro)))
                if stage > 0:
                    outputs.append((rank, Action("send_backward", done.chunk, done.micro)))
        for rank, send in sorted(outputs, key=turn):
            other, receive = send.other_end(rank, pp_size)
            if rank not in busy and other not in busy:
                outputs.remove((rank, send))
                lists[rank].append(send)
                lists[other].append(receive)
                kind: Kind = "forward" if send.kind == "send_forward" else "backward"
                ready.add((other, Action(kind, receive.chunk, receive.micro)))
        for rank in range(pp_size):
            if rank not in busy and todo[rank] and (rank, todo[rank][-1]) in ready:
                lists[rank].append(todo[rank].pop())
                busy[rank] = now + takes[lists[rank][-1].kind], lists[rank][-1]
        assert busy or not (any(todo) or outputs), f"the orders of computation fit no schedule: {orders}"
        now = min((end for end, _ in busy.values()), default=now)
    return tuple(map(tuple, lists))
