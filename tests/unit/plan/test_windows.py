"""Plans of models with windows of attention: operations layer by layer, time, uneven cuts, and memory of blocks."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from nxtrain.common.dimensions import Dimensions
from nxtrain.common.family import find_family
from nxtrain.plan.context import moved_scores, work_share
from nxtrain.plan.job import Job
from nxtrain.plan.memory import stage_bytes
from nxtrain.plan.speed import step_time
from nxtrain.plan.work import passes
from nxtrain.tools.trace.fake_rank import trace_job
from tests.support.memory import TOLERANCE
from tests.support.models import plan
from tests.unit.plan.test_context import SHAPE, job_of

LENGTH = 4096


def with_windows(job: Job, window: int | None, full_layers: int = 0) -> Job:
    return replace(job, dimensions=replace(job.dimensions, window=window, full_layers=full_layers))


def counted(dimensions: Dimensions, seq_len: int) -> float:
    """Operations of attention per token over all layers, forward, one pair of a query and a key at a time."""
    total = 0.0
    for layer in range(dimensions.num_layers):
        window = seq_len
        if dimensions.window is not None and layer >= dimensions.full_layers:
            window = dimensions.window
        pairs = sum(min(position + 1, window) for position in range(seq_len))
        total += 4 * dimensions.num_heads * dimensions.head_size * pairs / seq_len
    return total


@pytest.mark.parametrize("seed", range(8))
def test_operations_are_those_of_the_pairs_that_are_seen(seed: int) -> None:
    rng = Random(seed)
    layers, seq_len = rng.randint(1, 9), rng.randint(800, 2000)
    window = rng.choice([rng.randint(200, seq_len), seq_len + 1, None])
    full = rng.randint(0, layers - 1)
    actual = Dimensions(100, 96, layers, 6, 2, 16, 200, window=window, full_layers=full)
    matrices = 6 * (layers * actual.block_matmul_params + actual.vocab_size * actual.hidden_size)
    want = matrices + 3 * counted(actual, seq_len)
    assert actual.flops_per_token(seq_len) == pytest.approx(want, rel=3e-3)
    costs = actual.layer_costs(seq_len)
    assert 3 * (layers * costs.block + costs.head) == pytest.approx(actual.flops_per_token(seq_len), rel=1e-4)
    without = replace(actual, full_layers=0)
    if window is not None and window < seq_len and full:
        assert without.flops_per_token(seq_len) < actual.flops_per_token(seq_len)


def test_families_name_the_layers_without_a_window() -> None:
    used = {**SHAPE, "num_hidden_layers": 6, "sliding_window": 64}
    qwen = find_family("qwen2")
    for first, want in ((4, (64, 4)), (0, (64, 0)), (6, (None, 0)), (None, (64, 0))):
        actual = qwen.dimensions(qwen.config_type.model_validate({**used, "max_window_layers": first}))
        assert (actual.window, actual.full_layers) == want
    mistral = find_family("mistral")
    actual = mistral.dimensions(mistral.config_type.model_validate(used))
    assert (actual.window, actual.full_layers) == (64, 0)
    assert actual.windows(range(6)) == [(64, 6)]
    llama = find_family("llama").dimensions(find_family("llama").config_type.model_validate(SHAPE))
    assert (llama.window, llama.full_layers, llama.windows(range(2))) == (None, 0, [(None, 2)])


def test_a_part_takes_the_time_of_its_own_layers() -> None:
    job = with_windows(job_of({}, seq_len=LENGTH), 256, full_layers=1)
    (first, _), (second, _) = (passes(job, range(i, i + 1), has_head=False) for i in range(2))
    assert first.products == second.products
    assert second.attention / first.attention == pytest.approx((2 * 256 - 256**2 / LENGTH) / LENGTH, rel=1e-3)
    both, _ = passes(job, range(2), has_head=False)
    assert both.attention == first.attention + second.attention
    times = [step_time(with_windows(job, window, full)).step_s for window, full in ((None, 0), (256, 1), (256, 0))]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3
    ratio = step_time(with_windows(job, LENGTH)).step_s / times[0]
    assert ratio == 1.0


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_window_evens_out_the_work_of_ranks(layout: str) -> None:
    job = job_of({"cp": 4, "cp_layout": layout}, seq_len=LENGTH)
    assert work_share(job, 64, skips=True) == pytest.approx(1.0, rel=0.02)
    assert work_share(job, LENGTH, skips=True) == work_share(job, skips=True)
    # Ranks that share a graph compute all pairs, whatever is seen.
    assert work_share(job, 64, skips=False) == pytest.approx(LENGTH / 64, rel=0.02)
    assert moved_scores(job, 64) < moved_scores(job) / 10
    assert job.fuses_context
    precision = job.config.precision.model_copy(update={"params": "fp32", "update": "fp32"})
    wide = replace(job, config=job.config.model_copy(update={"precision": precision}))
    for each in (job, wide):
        whole, narrow = (passes(with_windows(each, window), range(2), has_head=False)[0] for window in (None, 64))
        assert (narrow.moved < whole.moved) == (each is wide), "FlashAttention writes no scores"
        assert narrow.attention < whole.attention / 10


@pytest.mark.parametrize("full_layers", [0, 1])
def test_blocks_of_a_window_take_the_planned_memory(full_layers: int) -> None:
    # FlashAttention takes no float32, and FlexAttention no heads of 8: the layers with a window go block by block.
    window: dict[str, Any] = {"sliding_window": 512, "max_window_layers": full_layers}
    narrow = {"num_attention_heads": 16, "num_key_value_heads": 8}
    resolved = plan(
        "mha",
        model={"family": "qwen2", "config": {**SHAPE, **narrow, **window}},
        train={"seq_len": 4096, "micro_batch": 1, "global_batch": 2},
        parallel={"dp": 1},
        precision={"params": "fp32", "update": "fp32"},
        backend={"name": "cuda"},
    )
    job = replace(job_of({}), dimensions=resolved.dimensions, config=resolved.config)
    assert job.attention == "blocked"
    result, planned = trace_job(job, 0), stage_bytes(job, 0)
    assert planned.total - planned.workspace == pytest.approx(result.total, rel=TOLERANCE)
    whole = stage_bytes(with_windows(job, 2048), 0)
    assert whole.total - whole.workspace != pytest.approx(result.total, rel=TOLERANCE)
