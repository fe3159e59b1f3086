"""Work of passes: operations of products and of attention, and bytes between them, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from nxtrain.plan.job import Job
from nxtrain.plan.speed import COMPILED_PASSES, EAGER_PASSES, MEMORY_SHARE, SPEEDS, step_time
from nxtrain.plan.work import Work, passes
from tests.support.published import job_of

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, VOCABULARY, TOKENS = 4096, 14336, 32, 8, 128, 128256, 8192
MATRICES = HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER
ROW: dict[str, Any] = {
    "model": "llama3-8b",
    "instance": "p5.48xlarge",
    "nodes": 1,
    "tp": 1,
    "pp": 1,
    "shard": "full",
    "seq_len": TOKENS,
    "global_batch": 8,
    "remat": "none",
    "compiled": True,
}


def job(**changes: Any) -> Job:
    return job_of({**ROW, **changes})


@pytest.mark.parametrize("tp", [1, 8])
def test_work_of_a_block_is_that_of_its_tensors(tp: int) -> None:
    """Of each tensor between products, one read and one write; two norms, two sums, the rotation and the gate."""
    forward, backward = passes(job(tp=tp), range(1), has_head=False)
    stream, rotated, gated = (2 * 2 + 2 * 3) * HIDDEN, 2 * (HEADS + KV_HEADS) * WIDTH, 3 * INNER
    moved = 2 * TOKENS * (stream + rotated + gated) / tp
    attention = 2 * HEADS * WIDTH * TOKENS * TOKENS
    assert forward == pytest.approx(Work(2 * MATRICES * TOKENS, attention, moved))
    assert backward == pytest.approx(Work(4 * MATRICES * TOKENS, 2 * attention, 2 * moved))


def test_norms_of_the_whole_sequence_are_on_every_rank_without_sequence_parallelism() -> None:
    cut, whole = (passes(job(tp=8, sequence_parallel=item), range(1), has_head=False)[0] for item in (True, False))
    assert whole.moved - cut.moved == 2 * TOKENS * 10 * HIDDEN * 7 / 8


def test_recomputation_repeats_a_part_of_the_forward_pass() -> None:
    forward, none = passes(job(), range(2), has_head=True)
    selective, full = (passes(job(remat=remat), range(2), has_head=True)[1] for remat in ("selective", "full"))
    head = 2 * TOKENS * VOCABULARY * HIDDEN
    logits = TOKENS * VOCABULARY * (3 * 2 + 3 * 4)
    assert selective == Work(none.products, none.attention + forward.attention, none.moved)
    expected = (none.products + forward.products - head, selective.attention, none.moved + forward.moved - logits)
    assert full == pytest.approx(Work(*expected))


@pytest.mark.parametrize("compiled", [False, True])
def test_time_of_a_step_is_that_of_its_work(compiled: bool) -> None:
    one, speed = job(compiled=compiled), SPEEDS["hopper"]
    work = [sum(pair) for pair in zip(*passes(one, range(32), has_head=True), strict=True)]
    repeats = COMPILED_PASSES if compiled else EAGER_PASSES
    seconds = (
        work[0] / (989e12 * speed.products)
        + work[1] / (989e12 * speed.attention)
        + work[2] * repeats / (3350e9 * MEMORY_SHARE)
    )
    assert step_time(one).compute_s == pytest.approx(one.num_micro * seconds)


def test_wide_models_and_short_sequences_come_closer_to_the_peak() -> None:
    def mfu(**changes: Any) -> float:
        return step_time(job(nodes=32, global_batch=256, **changes)).mfu

    assert mfu(model="llama3.2-1b") < mfu() < mfu(model="llama3-70b")
    assert mfu(seq_len=65536) < mfu() < mfu(seq_len=4096)
