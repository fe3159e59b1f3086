"""Schedules of pipeline parallelism: properties for any shape, small ones by hand, and torch's order of computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import _ComputationType as Computation

from nxtrain.parallel.schedule import Action, Kind, Schedule, evaluation_schedule, schedule, with_exchanges
from nxtrain.parallel.simulate import Span, simulate

Shape = tuple[int, int, int]  # ranks, chunks of each, micro-batches
Tensor = tuple[str, int, int]  # "forward" or "backward", the virtual stage that made it, micro-batch

SHAPES = [(p, v, m) for p in range(1, 9) for v in range(1, 5) if p > 1 or v == 1 for m in range(1, 21)]
Case = tuple[Shape, Callable[[int, int, int], Schedule]]


def zero_bubble(p: int, v: int, m: int) -> Schedule:
    return schedule(p, v, m, "zero_bubble")


KINDS: dict[Callable[[int, int, int], Schedule], list[Kind]] = {
    schedule: ["forward", "backward"],
    zero_bubble: ["forward", "backward", "weight"],
    evaluation_schedule: ["forward"],
}
"""Work of each schedule."""

cases: st.SearchStrategy[Case] = st.sampled_from(list(KINDS)).flatmap(
    lambda kind: st.sampled_from([(shape, kind) for shape in SHAPES if shape[1] == 1 or kind is not zero_bubble])
)

for_any = settings(derandomize=True)


def stage_of(action: Action, rank: int, p: int) -> int:
    return action.chunk * p + rank


def moved(action: Action, rank: int, p: int) -> Tensor:
    """The tensor of a transfer, said without the methods under test."""
    verb, direction = action.kind.split("_")
    stage = stage_of(action, rank, p)
    if verb == "receive":
        stage += -1 if direction == "forward" else 1
    return direction, stage, action.micro


def neighbour(action: Action, rank: int, p: int) -> int:
    return (rank + (1 if action.kind in ("send_forward", "receive_backward") else -1)) % p


def sent_by_stage(stage: int, direction: str, num_stages: int) -> bool:
    return stage < num_stages - 1 if direction == "forward" else stage > 0


def written(actions: Sequence[Action]) -> str:
    return " ".join(map(str, actions))


@given(cases)
@for_any
def test_every_computation_and_transfer_happens_once(case: Case) -> None:
    shape, kind = case
    p, v, m = shape
    every = [(direction, stage, micro) for direction in KINDS[kind] for stage in range(p * v) for micro in range(m)]
    done = [(rank, action) for rank, actions in enumerate(kind(*shape)) for action in actions]
    assert Counter((a.kind, stage_of(a, r, p), a.micro) for r, a in done if "_" not in a.kind) == Counter(every)
    crossing = Counter(
        tensor for tensor in every if tensor[0] != "weight" and sent_by_stage(tensor[1], tensor[0], p * v)
    )
    for verb in ("send", "receive"):
        assert Counter(moved(a, r, p) for r, a in done if a.kind.startswith(verb)) == crossing


@given(cases, st.integers(0, 2**32))
@for_any
def test_ranks_that_block_each_other_always_end_and_have_what_they_need(case: Case, seed: int) -> None:
    """A machine that knows nothing of time: any rank that can go on may be the next."""
    shape, kind = case
    p, v, _ = shape
    random = Random(seed)
    todo = [list(reversed(actions)) for actions in kind(*shape)]
    held: list[set[Tensor]] = [set() for _ in todo]

    def goes_on(rank: int) -> bool:
        action = todo[rank][-1]
        stage = stage_of(action, rank, p)
        if "_" in action.kind:
            tensor = moved(action, rank, p)
            other = neighbour(action, rank, p)
            if not todo[other] or "_" not in todo[other][-1].kind or moved(todo[other][-1], other, p) != tensor:
                return False
            sender, receiver = (rank, other) if action.kind.startswith("send") else (other, rank)
            assert tensor in held[sender]
            held[receiver].add(tensor)
            todo[other].pop()
        elif action.kind == "forward":
            assert stage == 0 or ("forward", stage - 1, action.micro) in held[rank]
        elif action.kind == "weight":
            assert ("backward", stage, action.micro) in held[rank]
        else:
            assert ("forward", stage, action.micro) in held[rank]
            assert stage == p * v - 1 or ("backward", stage + 1, action.micro) in held[rank]
        if "_" not in action.kind:
            held[rank].add((action.kind, stage, action.micro))
        todo[rank].pop()
        return True

    while any(todo):
        ranks = [rank for rank in range(p) if todo[rank]]
        assert any(goes_on(rank) for rank in random.sample(ranks, len(ranks))), "no rank can go on"


@given(cases)
@for_any
def test_both_ranks_of_a_pair_see_the_same_transfers(case: Case) -> None:
    shape, kind = case
    p, _, _ = shape
    seen: dict[tuple[int, int], list[Tensor]] = {}
    for rank, actions in enumerate(kind(*shape)):
        for action in actions:
            if "_" in action.kind:
                seen.setdefault((rank, neighbour(action, rank, p)), []).append(moved(action, rank, p))
    assert all(seen[other, rank] == tensors for (rank, other), tensors in seen.items())


@given(cases)
def test_what_is_joined_at_one_end_is_joined_at_the_other(case: Case) -> None:
    """And nothing is lost, moved or joined that is not a send beside a receive of the same two ranks."""
    shape, kind = case
    p, _, _ = shape
    actions = kind(*shape)
    joined = with_exchanges(actions)
    ends = Counter[frozenset[tuple[Tensor, ...]]]()
    for rank, steps in enumerate(joined):
        assert tuple(action for step in steps for action in step) == actions[rank]
        for one, *more in steps:
            if more:
                (other,) = more
                assert one.is_send != other.is_send
                assert one.other_end(rank, p)[0] == other.other_end(rank, p)[0]
                ends[frozenset({(moved(one, rank, p),), (moved(other, rank, p),)})] += 1
    assert set(ends.values()) <= {2}


def test_a_steady_pipeline_of_two_moves_both_ways_at_once() -> None:
    first, last = (" ".join("+".join(map(str, step)) for step in steps) for steps in with_exchanges(schedule(2, 1, 4)))
    assert first == "F0 F0> F1 F1> >B0 B0 F2 >B1+F2> B1 F3 >B2+F3> B2 >B3 B3"
    assert last == ">F0 F0 >F1 B0 B0> F1 B1 B1>+>F2 F2 B2 B2>+>F3 F3 B3 B3>"


@given(cases, st.booleans(), st.data())
@for_any
def test_whatever_computations_cost_they_begin_when_their_inputs_are_there(
    case: Case, blocking: bool, data: st.DataObject
) -> None:
    shape, kind = case
    p, v, _ = shape
    cost = st.lists(st.integers(1, 50), min_size=p * v, max_size=p * v)
    cost_s = {kind: data.draw(cost) for kind in KINDS[schedule] + ["weight"]}
    transfer_s = data.draw(st.integers(0, 20))
    of_step = cost_s["forward"], cost_s["backward"], transfer_s
    spans = simulate(kind(*shape), *of_step, weight_s=cost_s["weight"], blocking=blocking)
    at = {
        (span.action.kind, stage_of(span.action, span.rank, p), span.action.micro): span
        for span in spans
        if "_" not in span.action.kind
    }
    for (direction, stage, micro), span in at.items():
        assert span.end_s - span.start_s == cost_s[direction][stage]
        if direction == "weight":
            assert span.start_s >= at["backward", stage, micro].end_s
            continue
        before = stage - 1 if direction == "forward" else stage + 1
        if 0 <= before < p * v:
            assert span.start_s >= at[direction, before, micro].end_s + transfer_s
        if direction == "backward":
            assert span.start_s >= at["forward", stage, micro].end_s
    for rank in range(p):
        own = [span for span in spans if span.rank == rank]
        assert [span.action for span in own] == list(kind(*shape)[rank])
        assert all(one.end_s <= next_.start_s for one, next_ in pairwise(own))


@given(cases)
@for_any
def test_micro_batches_pass_a_chunk_in_order(case: Case) -> None:
    """So that gradients are summed in the same order for any layout, and the last backward is that of the last."""
    shape, kind = case
    _, v, m = shape
    for actions in kind(*shape):
        for direction in KINDS[kind]:
            for chunk in range(v):
                assert [a.micro for a in actions if a.kind == direction and a.chunk == chunk] == list(range(m))


def in_flight(actions: Sequence[Action], end: Kind = "backward") -> int:
    now, most = 0, 0
    for action in actions:
        now += (action.kind == "forward") - (action.kind == end)
        most = max(most, now)
    return most


@pytest.mark.parametrize("p", range(1, 9))
def test_forwards_in_flight_are_those_of_the_formula(p: int) -> None:
    for _, v, m in (shape for shape in SHAPES if shape[0] == p):
        group = -(-m // max(1, m // p))  # p for a multiple of p
        for rank, actions in enumerate(schedule(p, v, m)):
            formula = min(m, p - rank) if v == 1 else min(m * v, 2 * (p - rank - 1) + (v - 1) * group + 1)
            assert in_flight(actions) == formula


@pytest.mark.parametrize("p", range(1, 9))
def test_split_backwards_hold_no_more_than_the_first_rank_of_1f1b(p: int) -> None:
    """Source: Qi et al. 2024 (arXiv:2401.10241) section 2.1. Backwards to come are as many as in 1F1B."""
    for m in range(1, 21):
        for rank, actions in enumerate(zero_bubble(p, 1, m)):
            assert in_flight(actions, "weight") == min(m, p)
            assert in_flight(actions) == min(m, p - rank)
            done = {"backward": 0, "weight": 0}
            for action in actions:
                if action.kind in done:
                    done[action.kind] += 1
                    assert done["backward"] - done["weight"] <= rank + 1


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("cost_s", [(1, 1, 1), (2, 3, 2), (4, 4, 3), (5, 10, 5), (10, 9, 11)])
def test_split_backwards_leave_the_bubble_of_the_paper(p: int, cost_s: tuple[int, int, int]) -> None:
    """Source: Qi et al. 2024 (arXiv:2401.10241) section 2.3: (p-1)(F+B-W), while the last rank waits (p-1)F anyhow."""
    forward_s, backward_s, weight_s = cost_s
    for m in range(p, 21):
        spans = simulate(
            zero_bubble(p, 1, m), [forward_s] * p, [backward_s] * p, weight_s=[weight_s] * p, blocking=False
        )
        bubble_s = (p - 1) * (forward_s + max(0, backward_s - weight_s))
        assert max(span.end_s for span in spans) == m * sum(cost_s) + bubble_s


@pytest.mark.parametrize("p", range(1, 9))
def test_equal_stages_and_free_transfers_leave_the_ideal_bubble(p: int) -> None:
    """Exactly, whether transfers block or not, for any number of micro-batches.

    Source: Narayanan et al. 2021 section 2.2: a step takes m * v + p - 1 chunks' forwards and backwards. Fewer than p
    micro-batches leave ranks idle between chunks: the first comes back for its next chunk after p.
    """
    for _, v, m in (shape for shape in SHAPES if shape[0] == p):
        costs = [1] * (p * v), [2] * (p * v)
        step = m * v + p - 1 if m >= p else p * v + m - 1
        for blocking in (True, False):
            assert max(span.end_s for span in simulate(schedule(p, v, m), *costs, blocking=blocking)) == 3 * step
            assert max(span.end_s for span in simulate(evaluation_schedule(p, v, m), *costs, blocking=blocking)) == step


def test_a_transfer_keeps_both_ranks_or_none() -> None:
    once = (
        (Action("forward", 0, 0), Action("send_forward", 0, 0), Action("forward", 0, 1)),
        (Action("forward", 0, 1), Action("receive_forward", 0, 0), Action("forward", 0, 0)),
    )

    def times(blocking: bool) -> dict[str, Span]:
        spans = simulate(once, [1, 5], [0, 0], 2, blocking=blocking)
        return {f"{span.rank} {span.action}": span for span in spans}

    together = times(True)
    assert together["0 F0>"][2:] == together["1 >F0"][2:] == (5, 7)
    assert together["0 F1"][2:] == (7, 8)
    apart = times(False)
    assert apart["0 F0>"][2:] == (1, 1)
    assert apart["0 F1"][2:] == (1, 2)
    assert apart["1 F0"][2:] == (5, 10)  # it came at 3


def test_ranks_that_wait_for_each_other_are_named() -> None:
    first, second = schedule(2, 1, 1)
    assert written(first) == "F0 F0> >B0 B0"
    swapped = (first[0], first[2], first[1], first[3])
    with pytest.raises(AssertionError, match="rank 0 at >B0 for rank 1, rank 1 at >F0 for rank 0"):
        simulate((swapped, second), [1, 1], [2, 2], blocking=True)
    # Where it does not block, it may be asked for before it can be there, but not computed from.
    assert max(span.end_s for span in simulate((swapped, second), [1, 1], [2, 2], blocking=False)) == 6
    swapped = (first[0], first[2], first[3], first[1])
    with pytest.raises(AssertionError, match="rank 0 at B0 for rank 1, rank 1 at F0 for rank 0"):
        simulate((swapped, second), [1, 1], [2, 2], blocking=False)


class Recorder:
    """Stands for the stages of a rank in torch's schedules, and writes down what they are told to compute."""

    def __init__(self, rank: int, p: int, v: int) -> None:
        self.submod = None
        self.group_rank = self.stage_index = rank
        self.group_size, self.num_stages = p, p * v
        self.is_last = False
        self.actions: list[Action] = []

    def forward_one_chunk(self, micro: int, *_: object, **__: object) -> None:
        self.actions.append(Action("forward", 0, micro))

    def backward_one_chunk(self, micro: int, **_: object) -> None:
        self.actions.append(Action("backward", 0, micro))

    def no_transfers(self, micro: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers

    def scale_grads(self, grad_scale_factor: int) -> None: ...

    def ignored(self, *_: object) -> None:
        """Do nothing with a notice that torch 2.15 gives its stages."""

    release_fwd_send_outputs = perform_reduce_grad = ignored


def computations(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if "_" not in action.kind]


def test_1f1b_computes_in_the_order_of_torch() -> None:
    for p, _, m in ((p, v, m) for p, v, m in SHAPES if v == 1 and m >= p):  # torch refuses fewer
        for rank, actions in enumerate(schedule(p, 1, m)):
            recorder: Any = Recorder(rank, p, 1)
            torchs: Any = Schedule1F1B(recorder, m)
            torchs._stage_initialized = True
            torchs._initialize_stage = lambda *_: (None, None)  # torch 2.15 calls it in any case
            torchs._step_microbatches()
            assert computations(actions) == recorder.actions


def test_interleaved_1f1b_computes_in_the_order_of_torch() -> None:
    num_compared = 0
    for p, v, m in SHAPES:
        if v == 1 or m % max(1, m // p):  # torch refuses groups of different sizes
            continue
        for rank, actions in enumerate(schedule(p, v, m)):
            stages: Any = [Recorder(rank, p, v)] * v
            order = ScheduleInterleaved1F1B(stages, m).pipeline_order[rank]
            kind: dict[Any, Kind] = {Computation.FORWARD: "forward", Computation.FULL_BACKWARD: "backward"}
            reference = [
                Action(kind[one.computation_type], one.stage_index // p, one.microbatch_index or 0)
                for one in order
                if one is not None
            ]
            assert computations(actions) == reference
            num_compared += 1
    assert num_compared > 1000


def test_split_backwards_come_in_the_order_of_torch() -> None:
    kind: dict[Any, Kind] = {
        Computation.FORWARD: "forward",
        Computation.BACKWARD_INPUT: "backward",
        Computation.BACKWARD_WEIGHT: "weight",
    }
    num_compared = 0
    for p, v, m in SHAPES:
        if v > 1 or m % max(1, m // p):  # torch refuses groups of different sizes
            continue
        for rank, actions in enumerate(zero_bubble(p, 1, m)):
            stages: Any = [Recorder(rank, p, 1)]
            order = ScheduleInterleavedZeroBubble(stages, m).pipeline_order[rank]
            reference = [Action(kind[one.computation_type], 0, one.microbatch_index or 0) for one in order if one]
            assert computations(actions) == reference
            num_compared += 1
    assert num_compared > 500


def test_actions_are_values() -> None:
    action = Action("send_backward", 1, 3)
    assert str(action) == "B3.1>"
    assert action.other_end(0, 4) == (3, Action("receive_backward", 0, 3))
    assert action.other_end(2, 4) == (1, replace(action, kind="receive_backward"))
    assert Action("send_forward", 0, 3).other_end(3, 4) == (0, Action("receive_forward", 1, 3))
