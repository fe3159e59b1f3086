"""The table of all ranks: the busiest first, medians, and nothing of a damaged file."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median_low

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxtrain.common.run_folder import LOGS_DIR, RANKS_FILE
from nxtrain.tools.report.facts import KINDS, SHOWN, rank_times, read_rates
from nxtrain.tools.report.page import render
from nxtrain.tools.report.run import read_run
from tests.support.run_folders import write_run

RATES = st.lists(
    st.dictionaries(st.sampled_from([*KINDS]), st.integers(1, 999), min_size=1), min_size=2, max_size=2 * SHOWN
)


def written(folder: Path, content: object) -> Path:
    write_run(folder, steps=20)
    (folder / LOGS_DIR / RANKS_FILE).write_text(json.dumps(content), encoding="utf-8")
    return folder


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RATES)
def test_drawn_ranks_are_ordered_by_their_own_time(tmp_path: Path, rates: list[dict[str, int]]) -> None:
    in_s = {rank: {kind: ms / 1e3 for kind, ms in rate.items()} for rank, rate in enumerate(rates)}
    run = read_run(written(tmp_path, in_s))
    table, sentence = rank_times(run)
    assert table is not None
    *rows, medians = table.rows
    own = {rank: sum(ms for kind, ms in rate.items() if kind != "waiting") for rank, rate in enumerate(rates)}
    order = sorted(own, key=lambda rank: (-own[rank], rank))[:SHOWN]
    assert [row[0] for row in rows] == [f"rank {rank}" for rank in order]
    assert f"Rank {order[0]} is the busiest" in sentence
    names = {name: kind for kind, name in KINDS.items()}
    for rank, row in zip(order, rows, strict=True):
        shown = {names[head]: float(cell) for head, cell in zip(table.head[1:-1], row[1:-1], strict=True)}
        assert {kind: ms for kind, ms in shown.items() if ms} == {kind: float(ms) for kind, ms in rates[rank].items()}
        assert float(row[-1]) == sum(rates[rank].values())
    for head, cell in zip(table.head[1:-1], medians[1:-1], strict=True):
        assert float(cell) == median_low([rate.get(names[head], 0) for rate in rates])
    assert (f"{SHOWN} busiest of" in sentence) is (len(rates) > SHOWN)
    assert f"Rank {order[0]} is the busiest" in render([run])


DAMAGED = ["[]", "{", '{"0": 1, "1": 2}', '{"a": {}, "b": {}}', '{"0": {"data": "x"}, "1": {}}', '{"0": {"data": -1}}']
DAMAGED += ['{"0": {"data": NaN}, "1": {}}', '{"0": {"data": 1e99}, "1": {}}', '{"0": {"data": 1}}', "[" * 5000]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_and_a_lone_rank_have_no_table(tmp_path: Path, text: str) -> None:
    folder = written(tmp_path, {})
    (folder / LOGS_DIR / RANKS_FILE).write_text(text, encoding="utf-8")
    assert rank_times(read_run(folder)) == (None, "")
    assert "busiest" not in render([read_run(folder)])


def test_a_run_without_the_file_has_no_table(tmp_path: Path) -> None:
    assert not read_rates(tmp_path)
