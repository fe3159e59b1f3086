"""Batches of a ramp next to a count of tokens step by step, from the beginning and from any checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.common.batch_sizes import BatchSizes, EqualSteps, SeqLengths, spans
from nxtrain.config.schema import TrainConfig

SEQ_LEN = 16
STAGES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), max_size=4)


def ramp(stages: list[tuple[int, int]], last: int, *, in_tokens: bool = False) -> TrainConfig:
    """Configuration of stages that each train so many sequences with a batch."""
    table = [{"global_batch": batch, "samples": samples} for samples, batch in stages]
    if in_tokens:
        table = [{"global_batch": batch, "tokens": samples * SEQ_LEN} for samples, batch in stages]
    return TrainConfig.model_validate({"seq_len": SEQ_LEN, "global_batch": last, "batch_ramp": table})


def counted(stages: list[tuple[int, int]], last: int, steps: int) -> list[int]:
    """Global batch of each update, by the sequences that are seen before it."""
    batches, seen = [], 0
    for _ in range(steps):
        limit, batch = 0, last
        for samples, smaller in stages:
            limit += samples
            if seen < limit:
                batch = smaller
                break
        batches.append(batch)
        seen += batch
    return batches


@given(stages=STAGES, last=st.integers(1, 16), in_tokens=st.booleans(), start=st.integers(0, 80))
def test_sizes_follow_the_tokens_seen_from_any_step(
    stages: list[tuple[int, int]], last: int, in_tokens: bool, start: int
) -> None:
    train, batches = ramp(stages, last, in_tokens=in_tokens), counted(stages, last, 100)
    rows = [sum(batches[:step]) for step in range(101)]
    whole = train.batch_sizes()
    resumed = train.batch_sizes(start, rows[start] * SEQ_LEN)
    for step in range(start, 100):
        assert whole.at(step) == resumed.at(step) == batches[step]
        assert whole.before(step) == resumed.before(step) == rows[step]
    assert resumed.unit == whole.unit and not any(batch % whole.unit for batch in batches)
    in_order = [span.global_batch for span in spans(100, whole) for _ in range(span.steps)]
    assert in_order == batches


@given(stages=STAGES, last=st.integers(1, 16), wanted=st.one_of(st.integers(1, 900), st.floats(0.5, 900)))
def test_steps_for_rows_are_the_fewest_that_see_them(stages: list[tuple[int, int]], last: int, wanted: float) -> None:
    sizes = ramp(stages, last).batch_sizes()
    steps = sizes.steps_for(wanted)
    assert sizes.before(steps) >= wanted > sizes.before(steps - 1)


def test_a_run_without_a_ramp_counts_from_its_first_step_whatever_it_has_seen() -> None:
    sizes = ramp([], 8).batch_sizes(step=7, tokens=3 * SEQ_LEN)
    assert sizes == BatchSizes(8)
    assert (sizes.at(7), sizes.before(7), spans(3, sizes)) == (8, 56, [EqualSteps(3, 8)])


def test_the_tokens_seen_and_not_the_steps_decide_after_a_change() -> None:
    """A mutant: a ramp by steps would begin anew, or end early."""
    train = ramp([(40, 4)], 8)
    assert spans(12, train.batch_sizes()) == [EqualSteps(10, 4), EqualSteps(2, 8)]
    later = train.batch_sizes(step=5, tokens=8 * SEQ_LEN)
    assert [later.at(step) for step in range(5, 15)] == [4] * 8 + [8, 8]
    assert later.before(5) == 8


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 60])
def test_spans_have_the_steps_of_the_run(steps: int) -> None:
    assert sum(span.steps for span in spans(steps, ramp([(40, 4), (1, 2)], 8).batch_sizes())) == steps


@given(
    stages=STAGES,
    last=st.integers(1, 16),
    lengths=st.lists(st.tuples(st.integers(1, 900 * SEQ_LEN), st.sampled_from([1, 2, 4, 8])), max_size=3),
)
def test_spans_of_both_ramps_are_the_sizes_of_each_step(
    stages: list[tuple[int, int]], last: int, lengths: list[tuple[int, int]]
) -> None:
    sizes = ramp(stages, last).batch_sizes()
    of_rows = SeqLengths(SEQ_LEN, tuple(sorted(lengths)), sizes)
    in_order = [(span.global_batch, span.seq_len) for span in spans(100, sizes, of_rows) for _ in range(span.steps)]
    assert in_order == [(sizes.at(step), of_rows.at(step)) for step in range(100)]
