"""Cost of a pipeline, by hand and by the formulas of the field, and its picture."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from nxtrain.parallel.schedule import schedule
from nxtrain.plan.pipeline import PipelineCosts, figures
from nxtrain.plan.timeline import timeline

MIB = 1 << 20


def equal(p: int, v: int, m: int) -> PipelineCosts:
    """Forwards of 1 s that keep 10 MiB, backwards of 2 s, and 1 MiB between stages."""
    stages = range(p * v)
    return PipelineCosts(
        pp_size=p,
        virtual_pp=v,
        num_micro=m,
        forward_s=[1.0 for _ in stages],
        backward_s=[2.0 for _ in stages],
        kept_bytes=[10 * MIB for _ in stages],
        boundary_bytes=MIB,
    )


def split(p: int, m: int) -> PipelineCosts:
    """The same under ZB-H1: a second for each part of a backward, and 4 MiB that wait for the second of them."""
    return replace(
        equal(p, 1, m),
        order="zero_bubble",
        backward_s=[1.0] * p,
        weight_s=[1.0] * p,
        postponed_bytes=[4 * MIB] * p,
        blocking=False,
    )


SHAPES = [(p, v, m) for p in (1, 2, 3, 4, 8) for v in (1, 2, 3) if p > 1 or v == 1 for m in (1, 2, 4, 7, 8, 16)]


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_stages_have_the_ideal_bubble(shape: tuple[int, int, int]) -> None:
    p, v, m = shape
    got = figures(equal(*shape))
    assert got.ideal_bubble == (p - 1) / (m * v + p - 1)
    if m >= p or v == 1:
        assert got.step_s == 3 * (m * v + p - 1)
        assert got.bubble == pytest.approx(got.ideal_bubble, abs=1e-12)
    else:
        assert got.bubble > got.ideal_bubble
    assert [rank.busy_s for rank in got.ranks] == [3 * m * v] * p
    assert [rank.bubble for rank in got.ranks] == [pytest.approx(got.bubble, abs=1e-12)] * p


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_counted_is_what_the_formulas_say(shape: tuple[int, int, int]) -> None:
    p, v, m = shape
    got = figures(equal(*shape)).ranks
    for number, rank in enumerate(got):
        assert rank.forwards_in_flight == rank.forwards_in_flight_formula
        if v == 1:
            assert rank.forwards_in_flight == min(m, p - number)
        elif m % p == 0:
            assert rank.forwards_in_flight == min(m * v, 2 * (p - number - 1) + (v - 1) * p + 1)
        # The last stage sends no activations and the first no gradients.
        inner = 2 * v - (number == 0) - (number == p - 1)
        assert rank.sent_bytes == rank.received_bytes == m * inner * MIB
        # Beside what forwards keep: an output or gradients not yet sent, gradients in use, and what came early.
        if m % p == 0:
            assert 0 <= rank.activation_bytes - 10 * MIB * rank.forwards_in_flight <= (3 if v == 1 else 4) * MIB


def test_activations_by_hand() -> None:
    pipeline = replace(equal(2, 1, 3), kept_bytes=[10 * MIB, 100 * MIB])
    first, second = figures(pipeline).ranks
    assert " ".join(map(str, schedule(2, 1, 3)[0])) == "F0 F0> F1 F1> >B0 B0 F2 >B1 F2> B1 >B2 B2"
    # Two forwards in flight, the output of the second not yet sent while the gradients of B1 are there.
    assert first.activation_bytes == (2 * 10 + 2) * MIB
    # One forward in flight; its backward makes gradients while the next input, received before it, waits.
    assert second.activation_bytes == (100 + 2) * MIB
    assert (first.forwards_in_flight, second.forwards_in_flight) == (2, 1)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, v, m in SHAPES if v == 1])
def test_split_backwards_leave_a_third_of_the_bubble_and_hold_as_much_as_the_first_rank(p: int, m: int) -> None:
    got = figures(split(p, m))
    assert got.ideal_bubble == (p - 1) / (3 * m + p - 1)
    if m >= p:
        assert got.step_s == 3 * m + p - 1
        assert got.bubble == pytest.approx(got.ideal_bubble, abs=1e-12)
    else:
        assert got.bubble > got.ideal_bubble
    for number, rank in enumerate(got.ranks):
        assert rank.busy_s == 3 * m
        assert rank.forwards_in_flight == rank.forwards_in_flight_formula == min(m, p)
        # Of as many micro-batches as there are, some are between forward and backward, some before their weight part.
        most = max(10 * min(m - later, p - number) + 4 * later for later in range(min(m, number) + 1))
        assert 0 <= rank.activation_bytes / MIB - most <= 4


def test_a_split_backward_needs_all_of_its_costs() -> None:
    with pytest.raises(AssertionError, match="one cost for each virtual stage"):
        replace(split(2, 4), weight_s=())


def test_the_ideal_of_split_backwards_counts_the_forwards_before_the_last_rank() -> None:
    # Of W=2 and B=1 a rank could fill more than its bubble, but the last waits for three forwards.
    pipeline = replace(split(4, 8), weight_s=[2.0] * 4)
    assert figures(pipeline).ideal_bubble == pytest.approx(3 / (8 * 4 + 3))
    assert figures(pipeline).bubble == pytest.approx(3 / (8 * 4 + 3))


def test_a_slow_stage_leaves_the_others_idle() -> None:
    # The last of two stages takes 2 s and 4 s, 4 times over, after the first forward and before the last backward.
    got = figures(replace(equal(2, 1, 4), forward_s=[1.0, 2.0], backward_s=[2.0, 4.0]))
    assert got.step_s == 1 + 4 * 6 + 2
    assert [rank.busy_s for rank in got.ranks] == [12, 24]
    assert got.ranks[0].bubble == pytest.approx(15 / 27)
    assert got.bubble == pytest.approx(1 - 36 / 54)


def test_transfers_cost_more_where_they_block() -> None:
    pipeline = replace(equal(4, 1, 8), transfer_s=0.1)
    apart, together = figures(replace(pipeline, blocking=False)), figures(pipeline)
    # On the longest path are 33 s of computation and 16 or 33 transfers; 35 if no two pairs had theirs at once.
    assert apart.step_s == pytest.approx(34.6)
    assert together.step_s == pytest.approx(36.3)
    assert together.ranks[0].busy_s == 24
    assert together.bubble == pytest.approx(1 - 24 / together.step_s)


def test_costs_belong_to_virtual_stages() -> None:
    with pytest.raises(AssertionError, match="one cost for each virtual stage"):
        replace(equal(2, 2, 4), kept_bytes=[1, 1])
    # Stage 2 is the second chunk of rank 0.
    got = figures(replace(equal(2, 2, 4), forward_s=[1.0, 1.0, 5.0, 1.0])).ranks
    assert [rank.busy_s for rank in got] == [4 * 10, 4 * 6]


def test_the_picture_of_four_ranks() -> None:
    assert (
        timeline(equal(4, 1, 8))
        == """\
rank 0  F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--
rank 1  ..F0F1F2........B0--F3B1--F4B2--F5B3--F6B4--F7B5--..B6--..B7--....
rank 2  ....F0F1....B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--..B7--........
rank 3  ......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--............
        F7 is the forward and B7 the backward of micro-batch 7, dots are time without either"""
    )


def test_a_picture_that_does_not_fit_shows_the_beginning_and_says_so() -> None:
    lines = timeline(equal(4, 3, 32), width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("rank 0  F0---F1---F2---F3---F0.1-F1.1-")
    assert lines[4] == "        the first 14.4 s of 297 s; 1493 columns would show it all"
    whole = timeline(equal(4, 3, 32), width=1493).splitlines()
    assert all(line.startswith(beginning) for line, beginning in zip(whole[:4], lines[:4], strict=True))
    assert not any("the first" in line for line in whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_picture_shows_every_computation_and_every_bubble(shape: tuple[int, int, int]) -> None:
    p, v, m = shape
    step_s = figures(equal(*shape)).step_s
    per_s = len(str(m - 1)) + (3 if v > 2 else 1)  # a forward takes a second, and its label is the longest
    for line in timeline(equal(*shape), width=10_000).splitlines()[:p]:
        columns = re.sub(r"\.(\d)", r"\1", line.split("  ", 1)[1]) if v > 2 else line.split("  ", 1)[1]
        letters = Counter(letter.upper() for letter in columns if letter.isalpha())
        assert letters == {"F": m * v, "B": m * v}
        assert columns.count(".") == (step_s - 3 * m * v) * per_s
