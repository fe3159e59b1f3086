"""Searches for layouts: against a trial of every detail, and the transfers that speeds reckon with."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest

from nxtrain.plan.job import Job
from nxtrain.plan.memory import rank_bytes
from nxtrain.plan.predict import Assumptions, Prediction
from nxtrain.plan.search import CHUNKS, MAX_MICRO_BATCH, REMATS, Rejected, SearchResult, search
from nxtrain.plan.speed import SPEEDS, step_time
from nxtrain.plan.traffic import tp_bytes
from tests.support.published import job_of

ROW: dict[str, Any] = {
    "model": "llama2-70b",
    "instance": "p5.48xlarge",
    "nodes": 4,
    "tp": 8,
    "pp": 1,
    "shard": "zero1",
    "seq_len": 4096,
    "global_batch": 64,
    "remat": "none",
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model": "llama2-7b", "instance": "trn1.32xlarge", "nodes": 2},
        {"model": "llama3-8b", "instance": "p4d.24xlarge", "seq_len": 8192, "global_batch": 48},
    ],
    ids=["hopper", "lazy", "a100"],
)
def test_a_layout_is_the_fastest_of_all_orders_micro_batches_and_recomputations(change: dict[str, Any]) -> None:
    job = job_of({**ROW, **change})
    result = search(job.dimensions, job.machine, job.nodes, job.config, Assumptions())
    assert any(layout.job.config.parallel.virtual_pp > 1 for layout in result.layouts)
    every: tuple[Prediction | Rejected, ...] = (*result.layouts, *result.rejected)
    for layout in every:
        parallel, batch = layout.job.config.parallel, job.config.train.global_batch
        micros = [n for n in range(1, MAX_MICRO_BATCH + 1) if batch % (n * parallel.dp) == 0]
        turns = [(n, "1f1b") for n in CHUNKS if n == 1 or 1 < parallel.pp <= job.dimensions.num_layers // n]
        if parallel.pp > 1 and parallel.shard in ("none", "zero1") and not layout.job.is_lazy:
            turns.append((1, "zero_bubble"))
        trials = [
            changed(
                layout.job, parallel={"virtual_pp": n, "schedule": turn}, train={"micro_batch": micro, "remat": remat}
            )
            for (n, turn), micro, remat in product(turns, micros, REMATS)
        ]
        times = [step_time(t).step_s for t in trials if rank_bytes(t)[1].total <= job.machine.device_bytes]
        if isinstance(layout, Prediction):
            assert layout.time.step_s == min(times)
        elif "needs" in layout.reason:
            assert times == []


def changed(job: Job, **sections: dict[str, Any]) -> Job:
    tables = {name: getattr(job.config, name).model_copy(update=table) for name, table in sections.items()}
    return replace(job, config=job.config.model_copy(update=tables))


def test_more_chunks_make_the_bubble_smaller_and_the_transfers_more() -> None:
    job = job_of({**ROW, "pp": 4})
    whole, cut = (step_time(changed(job, parallel={"virtual_pp": chunks})) for chunks in (1, 2))
    assert cut.bubble < whole.bubble
    (sent,), (more,) = ([transfer.bytes for transfer in time.traffic if transfer.axis == "pp"] for time in (whole, cut))
    assert more == 2 * sent


@pytest.mark.parametrize("remat", ["none", "full"])
def test_products_of_column_layers_hide_their_transfers_on_eager_devices_only(remat: str) -> None:
    """With sequence parallelism 4 of 10 transfers have a product beside them, and of 14 with blocks recomputed."""
    job = job_of({**ROW, "nodes": 1, "remat": remat})
    (result,) = (transfer for transfer in step_time(job).traffic if transfer.axis == "tp")
    forward, backward, beside = tp_bytes(job, 1)
    assert (forward, backward) == pytest.approx((beside, (10 if remat == "full" else 6) / 4 * beside))
    assert result.hidden == pytest.approx(SPEEDS["hopper"].overlap * beside / (forward + backward))
    (exposed,) = (transfer for transfer in step_time(job, hides_tp=False).traffic if transfer.axis == "tp")
    assert exposed.hidden == pytest.approx(0, abs=1e-12)
    assert exposed.seconds == result.seconds
    saved = step_time(job, hides_tp=False).step_s - step_time(job).step_s
    assert saved == pytest.approx(result.hidden * result.seconds)
    lazy = job_of({**ROW, "instance": "trn1.32xlarge", "remat": remat})
    assert [transfer.hidden for transfer in step_time(lazy).traffic if transfer.axis == "tp"] == pytest.approx(
        [0], abs=1e-12
    )


def test_hybrid_sharding_gathers_within_a_machine_and_sums_between_machines() -> None:
    job = job_of({**ROW, "model": "llama3-8b", "tp": 1, "shard": "hybrid"})
    gathers, sums = step_time(job).traffic
    assert [(item.axis, item.link) for item in (gathers, sums)] == [("dp", "device"), ("dp", "network")]
    params = job.entries(0, 1).local
    outer = 2 * 128_256 * 4096 + 4096
    # A bf16 gather forward, of the blocks another backward, and the float32 gradients scattered, over 8 ranks.
    assert gathers.bytes == pytest.approx(job.num_micro * (params * (2 + 2 + 4) - 2 * outer) * 7 / 8)
    # Sums over 4 machines.
    assert sums.bytes == pytest.approx(2 * 3 / 4 * 4 * params / 8, rel=1e-3)
    (full,) = step_time(job_of({**ROW, "model": "llama3-8b", "tp": 1, "shard": "full"})).traffic
    assert (full.axis, full.link) == ("dp", "network")


def drawn_job(rng: Random, shard: str = "zero1") -> Job:
    """Run of a drawn model on drawn machines."""
    return job_of(
        {
            **ROW,
            "model": rng.choice(("llama2-7b", "llama3-8b", "llama2-13b")),
            "instance": rng.choice(("p5.48xlarge", "p4de.24xlarge", "p5en.48xlarge")),
            "nodes": rng.choice((2, 4, 8)),
            "tp": rng.choice((1, 2, 8)),
            "shard": shard,
            "global_batch": 512,
        }
    )


def with_network(job: Job, bytes_s: float) -> Job:
    return replace(job, machine=replace(job.machine, network_bytes_s=bytes_s))


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_a_step_add_up_and_no_share_is_outside_of_0_and_1(seed: int) -> None:
    rng = Random(seed)
    job = with_network(drawn_job(rng), rng.choice((1e9, 4e10, 4e11)))
    for result in search(job.dimensions, job.machine, job.nodes, job.config, Assumptions()).layouts:
        assert all(0 <= transfer.hidden <= 1 for transfer in result.time.traffic)
        assert all(seconds >= 0 for seconds in result.time.parts.values())
        assert sum(result.time.parts.values()) == pytest.approx(result.time.step_s, rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_the_words_of_a_search_follow_from_its_numbers(seed: int) -> None:
    job = drawn_job(Random(seed))
    result = search(job.dimensions, job.machine, job.nodes, job.config, Assumptions())
    best, second = result.layouts[:2]
    longest, slowed = re.findall(r"(?:fastest: (.+) is \d|most of it by (.+)\.$)", result.reason)
    assert best.time.parts[longest[0]] == max(best.time.parts.values())
    lost = {name: value - best.time.parts.get(name, 0.0) for name, value in second.time.parts.items()}
    assert lost[slowed[1]] == max(lost.values())
    for item in (best, second):
        parallel = item.job.config.parallel
        assert f"tp={parallel.tp} pp={parallel.pp} dp={parallel.dp} shard={parallel.shard} " in result.reason
    assert f"takes {second.time.step_s / best.time.step_s - 1:.1%} longer" in result.reason
    assert SearchResult((), ()).reason == ""


@pytest.mark.parametrize("seed", range(12))
def test_a_slower_network_never_helps_a_mode_with_more_bytes_on_it(seed: int) -> None:
    """Full sharding gathers over all machines what hybrid sharding gathers in one, and twice what grad_op does."""
    rng = Random(seed)
    jobs = {mode: drawn_job(Random(seed), mode) for mode in ("grad_op", "full", "hybrid")}
    networks = sorted((10 ** rng.uniform(9, 12) for _ in range(9)), reverse=True)
    steps = {mode: [step_time(with_network(job, network)).step_s for network in networks] for mode, job in jobs.items()}
    for times in steps.values():
        assert times == sorted(times)
    for lighter in ("grad_op", "hybrid"):
        behind = [full > light for full, light in zip(steps["full"], steps[lighter], strict=True)]
        assert behind == sorted(behind), "once overtaken, it stays behind"
    assert steps["full"][-1] > steps["hybrid"][-1]
