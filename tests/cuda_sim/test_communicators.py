"""NCCL calls of all ranks of drawn layouts: equal on every communicator, and free of deadlock; and no host waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from nxtrain.common.distributed.collectives import RowCounts
from nxtrain.parallel import expert_parallel
from nxtrain.tools.trace.fake_rank import zero_batch
from nxtrain.train.step import eval_step
from tests.cuda_sim.test_steps import started, step
from tests.support.cuda_sim import Event, Record, SimulatedGpu, mark, play_recorded
from tests.support.drawn import one_in
from tests.support.layouts import Degrees, covering_array


class Call(NamedTuple):
    """A call on a communicator; `peer` is the rank there of a transfer's partner, or of a root; -1: none."""

    name: str
    comm: str
    size: str
    dtype: str
    operation: str
    peer: int


Ranks = Mapping[str, Mapping[int, int]]
"""Global ranks of each communicator, by their rank there."""

PARTNER = {"send": "receive", "receive": "send"}


def communicators(records: Sequence[Record]) -> dict[str, dict[int, int]]:
    """Ranks of the communicators that the records open."""
    result = defaultdict[str, dict[int, int]](dict)
    for rank, record in enumerate(records):
        for event in record.of("open"):
            result[event.fields["comm"]][int(event.fields["rank"])] = rank
    return dict(result)


def groups_of(record: Record) -> list[list[Call]]:
    """Calls of a rank in order; those of one group are together."""
    groups: list[list[Call]] = []
    depth = 0
    for kind, fields in record.of("nccl", "group_begin", "group_end"):
        if kind != "nccl":
            if kind == "group_begin" and depth == 0:
                groups.append([])
            depth += 1 if kind == "group_begin" else -1
            continue
        if depth == 0:
            groups.append([])
        dtype, operation = fields["type"], fields["operation"]
        call = Call(fields["name"], fields["comm"], fields["count"], dtype, operation, int(fields["peer"]))
        groups[-1].append(call)
    return [group for group in groups if group]


def mismatches(records: Sequence[Record]) -> list[str]:
    """Communicators on which ranks make unequal calls, or that some ranks do not open; empty: none."""
    calls = [[call for group in groups_of(record) for call in group] for record in records]
    errors = []
    for comm, ranks in communicators(records).items():
        if sorted(ranks) != [*range(len(ranks))]:
            errors.append(f"{comm}: opened by ranks {ranks}")
            continue
        own = {number: [call for call in calls[rank] if call.comm == comm] for number, rank in ranks.items()}
        collectives = {number: [call for call in own[number] if call.name not in PARTNER] for number in own}
        for number, result in collectives.items():
            if result != collectives[0]:
                errors.append(f"{comm}: ranks {ranks[0]} and {ranks[number]}: {_difference(collectives[0], result)}")
        for number, peer in ((a, b) for a in own for b in own):
            sent = [call[2:5] for call in own[number] if (call.name, call.peer) == ("send", peer)]
            received = [call[2:5] for call in own[peer] if (call.name, call.peer) == ("receive", number)]
            if sent != received:
                errors.append(f"{comm}: rank {ranks[number]} to {ranks[peer]}: {_difference(sent, received)}")
    return errors


def _difference(a: Sequence[object], b: Sequence[object]) -> str:
    shorter = min(len(a), len(b))
    first = next((index for index in range(shorter) if a[index] != b[index]), shorter)
    return f"{len(a)} and {len(b)} calls, which differ from {first}: {a[first : first + 1]} and {b[first : first + 1]}"


def stuck(records: Sequence[Record]) -> dict[int, list[Call]]:
    """Calls in which ranks wait for ever, by rank; empty: all ranks come to their end."""
    ranks = communicators(records)
    waiting = [groups_of(record)[::-1] for record in records]
    moves = True
    while moves:
        moves = False
        for rank, groups in enumerate(waiting):
            while groups and _made(groups[-1][0], rank, waiting, ranks):
                moves = True
                _drop_empty(waiting)
            if groups:  # other calls of the group may have all their partners
                for call in groups[-1][1:]:
                    moves = _made(call, rank, waiting, ranks) or moves
                _drop_empty(waiting)
    return {rank: groups[-1] for rank, groups in enumerate(waiting) if groups}


def _made(call: Call, rank: int, waiting: Sequence[list[list[Call]]], ranks: Ranks) -> bool:
    """Remove a call of a rank, and those of its partners, if all partners are in theirs."""
    numbers = ranks[call.comm]
    if call.name in PARTNER:
        own = next(number for number, other in numbers.items() if other == rank)
        partner = numbers[call.peer]
        if partner == rank:  # as in an exchange of all ranks with all
            return _made_alone(call, waiting[rank][-1])
        theirs = {rank: call, partner: call._replace(name=PARTNER[call.name], peer=own)}
    else:
        theirs = dict.fromkeys(numbers.values(), call)
    if any(not waiting[other] or wanted not in waiting[other][-1] for other, wanted in theirs.items()):
        return False
    for other, wanted in theirs.items():
        waiting[other][-1].remove(wanted)
    return True


def _made_alone(call: Call, group: list[Call]) -> bool:
    """Remove a transfer of a rank with itself, if both ends are in one group."""
    other = call._replace(name=PARTNER[call.name])
    if other not in group:
        return False
    group.remove(call)
    group.remove(other)
    return True


def _drop_empty(waiting: Sequence[list[list[Call]]]) -> None:
    for groups in waiting:
        if groups and not groups[-1]:
            groups.pop()


Tables = Mapping[str, Mapping[str, Any]]
Judgement = tuple[list[str], dict[int, list[Call]], list[Event]]
"""Unequal calls of ranks, calls that wait for ever, and waits of hosts in the third step and second evaluation."""


def three_steps(backend: Any, tables: Tables) -> None:
    """A rank from its start through three steps and an evaluation, after whose first comes a point."""
    resolved, state = started(backend, tables)
    for _ in range(2):
        step(resolved, state)
    eval_step(state, zero_batch(resolved, state))
    mark("third")
    step(resolved, state)
    eval_step(state, zero_batch(resolved, state))
    state.backend.step_boundary()


def judged(world: int, tables: Tables) -> Judgement:
    """Judgement of the first steps and evaluations of a run."""
    records = play_recorded(world, three_steps, tables)
    waits = [event for record in records for event in record.after("third").host_waits]
    return mismatches(records), stuck(records), waits


def tables_of(degrees: Degrees) -> dict[str, dict[str, Any]]:
    """A run in a layout, of two blocks for each chunk of a stage."""
    layers, heads = max(2, degrees.pp * degrees.virtual_pp), 12
    shape = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": 16 * heads,
        "intermediate_size": 96,
        "vocab_size": 480,
        "max_position_embeddings": 512,
    }
    model: dict[str, Any] = {"config": shape}
    if degrees.ep > 1:
        model |= {"family": "mixtral", "moe_dispatch": "capacity"}
        shape["num_local_experts"] = 2 * degrees.ep
    train = {"global_batch": 2 * degrees.dp * degrees.pp, "micro_batch": 1, "seq_len": 192}
    return {"parallel": asdict(degrees), "train": train, "model": model}


LAYOUTS = [*covering_array(1, 16), *covering_array(2, 16, cp=True)]
EXPERTS = covering_array(3, 16, ep=True)


@pytest.mark.parametrize("degrees", [*one_in(8, LAYOUTS), *one_in(60, EXPERTS)], ids=str)
def test_all_ranks_make_equal_calls_and_none_waits_for_ever(gpu: SimulatedGpu, degrees: Degrees) -> None:
    """With experts divided over ranks as well, if these have a capacity."""
    assert gpu.run(judged, degrees.world, tables_of(degrees)) == ([], {}, [])


HIGH_PRIORITY = 0x10000000
"""Bit in the numbers of such streams, see `runtime.c`."""


def test_collectives_of_tensor_parallel_ranks_go_before_those_of_replicas(gpu: SimulatedGpu) -> None:
    tables = {"parallel": {"tp": 2, "dp": 2}}
    records = gpu.run(play_recorded, 4, three_steps, tables)
    ranks_of = communicators(records)
    calls = Counter[tuple[bool, bool]]()
    for record in records:
        for event in record.of("nccl"):
            ranks = sorted(ranks_of[event.fields["comm"]].values())
            is_high = bool(int(event.fields["stream"], 16) & HIGH_PRIORITY)
            calls[ranks in ([0, 1], [2, 3]), is_high] += 1  # torch's own sharding has streams of its own
    assert set(calls) == {(True, True), (False, False)}


def judged_with_even_experts(degrees: Degrees) -> Judgement:
    """Judgement of a run without a capacity, in which every expert gets as many tokens, since the device counts none.

    The host reads the numbers of rows in each block, which is left out here.
    """
    tables = tables_of(degrees)
    tables["model"]["moe_dispatch"] = "dropless"
    slots = tables["train"]["seq_len"] // degrees.cp * SLOTS_OF_TOKEN
    even = (slots // degrees.ep,) * degrees.ep
    with patch.object(expert_parallel, "_read", lambda *_: RowCounts(even, even)):
        return judged(degrees.world, tables)


SLOTS_OF_TOKEN = 2
DROPLESS = [Degrees(tp=2, dp=2, ep=2, sequence_parallel=True), Degrees(pp=2, dp=4, ep=4, shard="full")]


@pytest.mark.parametrize("degrees", one_in(2, DROPLESS), ids=str)
def test_ranks_that_exchange_all_tokens_make_equal_calls(gpu: SimulatedGpu, degrees: Degrees) -> None:
    assert gpu.run(judged_with_even_experts, degrees) == ([], {}, [])
