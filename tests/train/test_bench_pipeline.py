"""The executor on real processes leaves the bubble of the field's formula, and does what its schedule says."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

HIDDEN_BYTES = 16 * 512 * 4
"""Of what stages send: tokens, width, float32."""


def bench(*options: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "nxtrain", "bench", "pipeline", "--seq-len", "16", "--json", *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_bubble_of_the_formula(
    found: dict[str, Any], pp: int, virtual_pp: int, micro: int, forward_ms: int, in_flight: list[int]
) -> None:
    """Hold measured 1F1B against its formulas; the smaller the bubble, the more a transfer adds to it."""
    measured = found["measured"]
    ideal = (pp - 1) / (micro * virtual_pp + pp - 1)
    assert found["ideal_bubble"] == ideal
    assert measured["bubble"] == pytest.approx(ideal, rel=0.1)
    # Beside the bubble: each rank was busy as long as its chunks sleep, and no longer than a busy machine oversleeps.
    slept_s = 3e-3 * forward_ms * micro * virtual_pp
    assert all(slept_s <= busy_s < 1.1 * slept_s for busy_s in measured["busy_s"])
    assert measured["forwards_in_flight"] == measured["forwards_in_flight_formula"] == in_flight
    assert measured["held_bytes"] == found["expected"]["held_bytes"]
    ends = [2 * virtual_pp - (rank == 0) - (rank == pp - 1) for rank in range(pp)]
    assert measured["sent_bytes"] == [micro * number * HIDDEN_BYTES for number in ends]


@pytest.mark.alone
@pytest.mark.slow
def test_chunks_leave_the_bubble_of_the_formula() -> None:
    found = bench("--pp", "2", "--virtual-pp", "2", "--micro", "4", "--forward-ms", "80", "--rounds", "4")
    assert_bubble_of_the_formula(found, 2, 2, 4, 80, [5, 3])


@pytest.mark.alone
def test_equal_stages_leave_the_bubbles_of_their_formulas_and_split_backwards_are_faster() -> None:
    """Of F=B=W the bubble is a third of that of 1F1B, which runs in turn with it."""
    pp, micro, forward_ms = 4, 6, 60
    degrees = ("--pp", str(pp), "--micro", str(micro), "--schedule", "zero_bubble")
    found = bench(*degrees, "--forward-ms", str(forward_ms), "--rounds", "4")
    assert_bubble_of_the_formula(found["1f1b"], pp, 1, micro, forward_ms, [4, 3, 2, 1])
    measured, plain = found["measured"], found["1f1b"]["measured"]
    ideal = (pp - 1) / (3 * micro + pp - 1)
    assert found["ideal_bubble"] == pytest.approx(ideal, rel=1e-9)
    assert measured["bubble"] == pytest.approx(ideal, rel=0.1)
    slept_s = 3e-3 * forward_ms * micro
    assert all(slept_s <= busy_s < 1.1 * slept_s for busy_s in measured["busy_s"])
    assert measured["step_s"] / plain["step_s"] == pytest.approx(
        (3 * micro + pp - 1) / (3 * (micro + pp - 1)), rel=0.03
    )
    assert measured["forwards_in_flight"] == measured["forwards_in_flight_formula"] == [pp] * pp
    assert measured["held_bytes"] == found["expected"]["held_bytes"]
    assert measured["sent_bytes"] == plain["sent_bytes"]


def test_stages_compute_blocks_too() -> None:
    """Times are not compared, since ranks may share cores."""
    found = bench("--pp", "2", "--micro", "2", "--work", "blocks", "--rounds", "1")
    measured = found["measured"]
    assert measured["forwards_in_flight"] == [2, 1]
    assert measured["sent_bytes"] == [2 * HIDDEN_BYTES] * 2
    assert 0 < measured["bubble"] < 1
    assert all(0 < busy_s < measured["step_s"] for busy_s in measured["busy_s"])
    assert sum(found["expected"]["busy_s"]) == pytest.approx(sum(measured["busy_s"]))


def test_a_picture_costs_no_run() -> None:
    argv = [sys.executable, "-m", "nxtrain", "bench", "pipeline", "--pp", "2", "--micro", "2", "--dry-run"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("expected:\nrank 0  F0F1....B0--..B1--\nrank 1  ..F0B0--F1B1--....\n")
    assert "measured:" not in done.stdout


def test_split_backwards_are_pictured_and_compared() -> None:
    options = ["--pp", "2", "--micro", "2", "--schedule", "zero_bubble", "--dry-run"]
    argv = [sys.executable, "-m", "nxtrain", "bench", "pipeline", *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("expected:\nrank 0  F0F1..B0W0B1W1\nrank 1  ..F0B0F1B1W0W1\n")
    # Forwards take 50 ms: nine of them under 1F1B, where the backward counts two, and else seven.
    last = "1f1b for comparison: bubble 33.3%, step 450.0 ms; zero_bubble saves 22.2% of that"
    assert done.stdout.splitlines()[-1] == last


def test_chunks_have_no_split_backwards() -> None:
    options = ["--schedule", "zero_bubble", "--virtual-pp", "2"]
    argv = [sys.executable, "-m", "nxtrain", "bench", "pipeline", *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--virtual-pp 2 has no schedule zero_bubble, which is for 1" in done.stderr


def test_one_stage_is_no_pipeline() -> None:
    argv = [sys.executable, "-m", "nxtrain", "bench", "pipeline", "--pp", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--pp 1 is no pipeline" in done.stderr
