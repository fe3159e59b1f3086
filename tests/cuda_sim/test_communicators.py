"""NCCL calls of all ranks of drawn layouts: equal on every communicator, and free of deadlock; and no host waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from tests.cuda_sim.test_steps import started, step
from tests.support.cuda_sim import Event, SimulatedGpu, mark, play_recorded
from tests.support.drawn import one_in
from tests.support.layouts import Degrees, covering_array
from tests.support.nccl_order import Call, mismatches, stuck

Tables = Mapping[str, Mapping[str, Any]]
Judgement = tuple[list[str], dict[int, list[Call]], list[Event]]
"""Unequal calls of ranks, calls that wait for ever, and waits of hosts in the third step."""


def three_steps(backend: Any, tables: Tables) -> None:
    """A rank from its start through three steps, with a point before the third."""
    resolved, state = started(backend, tables)
    for _ in range(2):
        step(resolved, state)
    mark("third")
    step(resolved, state)


def judged(world: int, tables: Tables) -> Judgement:
    """Judgement of the three first steps of a run."""
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


@pytest.mark.parametrize("degrees", one_in(3, LAYOUTS), ids=str)
def test_all_ranks_make_equal_calls_and_none_waits_for_ever(gpu: SimulatedGpu, degrees: Degrees) -> None:
    assert gpu.run(judged, degrees.world, tables_of(degrees)) == ([], {}, [])
