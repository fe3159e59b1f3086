"""Trace of a sharded step on a pretended rank: the order that real ranks have, under drawn settings."""

from __future__ import annotations

import json
from random import Random

import pytest

from nxtrain.common.machines import MACHINES
from nxtrain.plan.job import Job
from nxtrain.tools.trace.step_trace import trace_step
from tests.dist.test_gathering_order import expected, sharded
from tests.support import TINY
from tests.support.commands import errors_of, output_of
from tests.support.drawn import one_in


@pytest.mark.parametrize("seed", one_in(2, range(8)))
def test_a_pretended_rank_has_the_order_that_real_ranks_have(seed: int) -> None:
    rng = Random(seed)
    shard, dp = rng.choice([("full", 2), ("full", 64), ("grad_op", 8), ("hybrid", 4)])
    kind, forward, prefetch = rng.choice(["before", "after", "none"]), rng.choice([True, False]), rng.choice([1, 2, 3])
    resolved = sharded(shard, dp, micro=1, prefetch=prefetch, forward_prefetch=forward, backward_prefetch=kind)
    job = Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, resolved.config)
    wanted = expected(
        forward_ahead=prefetch if forward else 0, backward_ahead=prefetch, again=shard != "grad_op", kind=kind
    )
    assert trace_step(resolved, job) == wanted


def test_recomputation_and_documents_change_no_event_and_json_has_all() -> None:
    results = []
    for change in ("train.remat=none", "train.remat=full", "data.doc_mask=true"):
        layout = ["parallel.shard=full", "parallel.dp=2", "train.micro_batch=4"]
        results.append(json.loads(output_of("inspect", TINY, *layout, change, "--trace", "--json"))["events"])
    assert results[0] == results[1] == results[2]
    assert results[0][:3] == ["gather rest", "gather embedding", "gather 0"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "parallel.shard"),
        (("parallel.shard=zero1", "parallel.dp=2"), "zero1 over 2 ranks gathers no FSDP units"),
        (("parallel.shard=full", "parallel.dp=1"), "full over 1 ranks gathers no FSDP units"),
        (("parallel.shard=full", "parallel.dp=2", "parallel.pp=2"), "parallel.pp"),
    ],
)
def test_a_layout_without_such_an_order_is_refused(overrides: tuple[str, ...], words: str) -> None:
    assert words in errors_of("inspect", TINY, "train.micro_batch=4", *overrides, "--trace")
