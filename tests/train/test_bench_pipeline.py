"""The executor on real processes leaves the bubble of the field's formula, and does what its schedule says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import forked, outcome

HIDDEN_BYTES = 16 * 512 * 4
"""Of what stages send: tokens, width, float32."""


def bench(folder: Path, *options: str) -> dict[str, Any]:
    code, out, errors = forked(folder, "bench", "pipeline", "--seq-len", "16", "--json", *options)
    assert code == 0, errors
    result: dict[str, Any] = json.loads(out)
    return result


def assert_bubble_of_the_formula(
    result: dict[str, Any], pp: int, virtual_pp: int, micro: int, forward_ms: int, in_flight: list[int]
) -> None:
    """Hold measured 1F1B against its formulas; the smaller the bubble, the more a transfer adds to it."""
    measured = result["measured"]
    ideal = (pp - 1) / (micro * virtual_pp + pp - 1)
    assert result["ideal_bubble"] == ideal
    assert measured["bubble"] == pytest.approx(ideal, rel=0.1)
    # Beside the bubble: each rank was busy as long as its chunks sleep, and no longer than a busy machine oversleeps.
    slept_s = 3e-3 * forward_ms * micro * virtual_pp
    assert all(slept_s <= busy_s < 1.1 * slept_s for busy_s in measured["busy_s"])
    assert measured["forwards_in_flight"] == measured["forwards_in_flight_formula"] == in_flight
    assert measured["held_bytes"] == result["expected"]["held_bytes"]
    ends = [2 * virtual_pp - (rank == 0) - (rank == pp - 1) for rank in range(pp)]
    assert measured["sent_bytes"] == [micro * number * HIDDEN_BYTES for number in ends]


@pytest.mark.alone
@pytest.mark.slow
def test_chunks_leave_the_bubble_of_the_formula(tmp_path: Path) -> None:
    result = bench(tmp_path, "--pp", "2", "--virtual-pp", "2", "--micro", "4", "--forward-ms", "80", "--rounds", "4")
    assert_bubble_of_the_formula(result, 2, 2, 4, 80, [5, 3])


@pytest.mark.alone
@pytest.mark.slow
def test_equal_stages_leave_the_bubbles_of_their_formulas_and_split_backwards_are_faster(tmp_path: Path) -> None:
    """Of F=B=W the bubble is a third of that of 1F1B, which runs in turn with it."""
    pp, micro, forward_ms = 4, 6, 60
    degrees = ("--pp", str(pp), "--micro", str(micro), "--schedule", "zero_bubble")
    result = bench(tmp_path, *degrees, "--forward-ms", str(forward_ms), "--rounds", "4")
    assert_bubble_of_the_formula(result["1f1b"], pp, 1, micro, forward_ms, [4, 3, 2, 1])
    measured, plain = result["measured"], result["1f1b"]["measured"]
    ideal = (pp - 1) / (3 * micro + pp - 1)
    assert result["ideal_bubble"] == pytest.approx(ideal, rel=1e-9)
    assert measured["bubble"] == pytest.approx(ideal, rel=0.1)
    slept_s = 3e-3 * forward_ms * micro
    assert all(slept_s <= busy_s < 1.1 * slept_s for busy_s in measured["busy_s"])
    assert measured["step_s"] / plain["step_s"] == pytest.approx(
        (3 * micro + pp - 1) / (3 * (micro + pp - 1)), rel=0.03
    )
    assert measured["forwards_in_flight"] == measured["forwards_in_flight_formula"] == [pp] * pp
    assert measured["held_bytes"] == result["expected"]["held_bytes"]
    assert measured["sent_bytes"] == plain["sent_bytes"]


def test_a_picture_costs_no_run() -> None:
    code, out, errors = outcome("bench", "pipeline", "--pp", "2", "--micro", "2", "--dry-run")
    assert (code, errors) == (0, "")
    assert out.startswith("expected:\nrank 0  F0F1....B0--..B1--\nrank 1  ..F0B0--F1B1--....\n")
    assert "measured:" not in out


def test_split_backwards_are_pictured_and_compared() -> None:
    options = ["--pp", "2", "--micro", "2", "--schedule", "zero_bubble", "--dry-run"]
    code, out, errors = outcome("bench", "pipeline", *options)
    assert (code, errors) == (0, "")
    assert out.startswith("expected:\nrank 0  F0F1..B0W0B1W1\nrank 1  ..F0B0F1B1W0W1\n")
    # Forwards take 50 ms: nine of them under 1F1B, where the backward counts two, and else seven.
    last = "1f1b for comparison: bubble 33.3%, step 450.0 ms; zero_bubble saves 22.2% of that"
    assert out.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--schedule", "zero_bubble", "--virtual-pp", "2"), "schedule zero_bubble needs --virtual-pp 1, not 2"),
        (("--pp", "1"), "--pp 1 is not a pipeline"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(options: tuple[str, ...], words: str) -> None:
    code, _, errors = outcome("bench", "pipeline", *options)
    assert (code, words in errors) == (2, True)
