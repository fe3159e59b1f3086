"""Columns of metrics files, against a plain reading line by line, on drawn lines of every kind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxtrain.common.io.jsonl import parse
from nxtrain.tools.report import columns
from nxtrain.tools.report.columns import MOST, NUMBERS, read_columns

NUMBER = st.one_of(
    st.none(),
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from([1e99, -1e101, 5e-324, 1e308, 10**400]),
)
OTHER = st.one_of(st.booleans(), st.text(max_size=5), st.lists(st.integers(), max_size=2), st.just(math.nan))
RECORD = st.fixed_dictionaries(
    {"step": st.one_of(st.integers(0, 30), st.sampled_from([-1, 2.5, 3.0, None, "4", True, 1e300]))},
    optional={
        **dict.fromkeys(NUMBERS[:4], st.one_of(NUMBER, NUMBER, OTHER)),
        "alarm": st.one_of(st.text(max_size=8), st.none(), st.integers()),
        "skipped_steps": st.one_of(st.lists(st.integers(1, 30), max_size=3), st.just("no")),
        "spikes": st.one_of(st.lists(st.lists(st.integers(0, 30), max_size=3), max_size=2), st.just([["a", 1]])),
        "of another tool": st.recursive(
            st.integers(), lambda inner: st.dictionaries(st.text(max_size=2), inner), max_leaves=3
        ),
    },
)
LINE = st.one_of(
    RECORD.map(lambda result: json.dumps(result).encode()),
    RECORD.map(lambda result: json.dumps(result).encode()),
    st.sampled_from([b"", b"{", b"[1, 2]", b"null", b"\xff\xfe", b'{"step": 3, "loss": 1', b'{"step": 7, "step": 8}']),
)


def number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        result = float(value)
    except OverflowError:
        return math.nan
    return result if abs(result) <= MOST else math.nan


def plainly(content: bytes) -> tuple[dict[int, dict[str, float]], int]:
    """Numbers of the last record of each step, and the number of lines that are none; a begun line is no such line."""
    results: dict[int, dict[str, float]] = {}
    damaged = 0
    *whole, torn = content.split(b"\n")
    for at, line in enumerate([*whole, torn]):
        if not line.strip():
            continue
        try:
            read: Any = json.loads(line.decode(errors="replace"))
        except ValueError:
            damaged += at < len(whole) or not line.startswith(b"{")
            continue
        step = number(read.get("step")) if isinstance(read, dict) else math.nan
        if not (step >= 0 and step == int(step) and step <= 2**53):
            damaged += 1
            continue
        results[int(step)] = {key: number(read.get(key)) for key in NUMBERS}
    return results, damaged


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(LINE, max_size=12),
    is_torn=st.booleans(),
    block=st.sampled_from([40, 200, 1 << 25]),
    few=st.sampled_from([1, 60, 1 << 16]),
)
def test_columns_are_those_of_a_plain_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[bytes], is_torn: bool, block: int, few: int
) -> None:
    monkeypatch.setattr(columns, "FEW_BYTES", few)
    monkeypatch.setattr(columns, "BLOCK_BYTES", max(block, 2 * max(map(len, lines), default=1)))
    content = b"\n".join(lines) + b"\n" * (not is_torn)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(content)
    expected, damaged = plainly(content)
    actual = read_columns(file)
    assert actual.steps.tolist() == sorted(expected)
    assert actual.damaged == damaged
    tail = content.rpartition(b"\n")[2]
    assert actual.torn == tail.startswith(b"{")
    for key in NUMBERS:
        values = [expected[step][key] for step in sorted(expected)]
        if any(map(math.isfinite, values)):
            np.testing.assert_array_equal(actual.numbers[key], values)
        else:
            assert key not in actual.numbers


def test_texts_beside_the_numbers_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    alarms = [{"step": 1, "alarm": "spike"}, {"step": 2}, {"step": 3, "skipped_steps": [2, 3], "spikes": [[1, 2]]}]
    good = "".join(json.dumps(alarm) + "\n" for alarm in alarms)
    for extra in ("", "damaged\n"):  # the same by both ways of reading
        file.write_text(good + extra, encoding="utf-8")
        result = read_columns(file)
        assert (result.alarms, result.num_alarms) == (((1, "spike"),), 1)
        assert (result.skipped, result.spikes) == ((2, 3), ((1, 2),))


def test_a_line_without_end_is_read_in_pieces_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "BLOCK_BYTES", 64)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "loss": 2.0}\n' + b"x" * 1000 + b'\n{"step": 2, "loss": 1.0}\n')
    assert read_columns(file).steps.tolist() == [1, 2]


def test_of_one_step_the_last_record_counts_even_without_a_line_feed(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 3.0}\n{"step": 2, "loss": 4.0}')
    result = read_columns(file)
    assert result.numbers["loss"].tolist() == [2.0, 4.0]
    assert (result.repeated, result.torn) == (1, True)


@pytest.mark.parametrize("seed", range(4))
def test_an_odd_line_leaves_few_others_to_the_slow_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    lines = [json.dumps({"step": step, "loss": step / 7, "of another tool": "x" * 80}) for step in range(20_000)]
    odd = sorted(draw.choice(len(lines), 5, replace=False).tolist())
    for at in odd:
        lines[at] = str(draw.choice(["{", '{"step": 5, "of another tool": {"a": 1}}', "null", '{"step": "5"}']))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    slow: list[str] = []
    monkeypatch.setattr(columns, "parse", lambda line: slow.append(line) or parse(line))  # type: ignore[func-returns-value]
    result = read_columns(tmp_path / "metrics.jsonl")
    kept = [step for step in range(len(lines)) if step not in odd]
    assert {*kept} <= {*result.steps.astype(int).tolist()} <= {*kept, 5}
    assert sum(map(len, slow)) <= len(odd) * columns.FEW_BYTES


def test_a_long_reading_shows_its_share_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "BLOCK_BYTES", 1000)
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)), encoding="utf-8")
    total = file.stat().st_size
    with mock.patch.object(columns, "Progress") as progress:
        read_columns(file)
    progress.assert_called_once_with(f"reading {file}", total, on_terminals_only=True)
    done = [call.args[0] for call in progress.return_value.__enter__.return_value.show.call_args_list]
    assert done == sorted(done)
    assert done[-1] == total
    assert abs(len(done) - total / 1000) < 2
