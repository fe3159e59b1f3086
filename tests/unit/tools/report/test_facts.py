"""Tables of the page: stability, times of ranks, and the plan next to the measurements, on drawn records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxtrain.common.run_folder import LOGS_DIR, RANKS_FILE
from nxtrain.tools.report.columns import Columns
from nxtrain.tools.report.facts import (
    FEWEST_FITTED,
    FIT_FROM,
    PARTS,
    SHOWN,
    fit_of,
    planned,
    rank_times,
    read_rates,
    stability,
)
from nxtrain.tools.report.page import render
from nxtrain.tools.report.run import RecordedRun, read_run
from tests.support.commands import output_of
from tests.support.run_folders import record, start, write_run


def run_of(steps: Any, **columns: Any) -> RecordedRun:
    spikes = columns.pop("spikes", ())
    numbers = {key: np.array(values, dtype=np.float64) for key, values in columns.items()}
    return RecordedRun(Path("run"), "run", Columns(np.array(steps, dtype=np.float64), numbers, spikes=tuple(spikes)))


def shown_of(run: RecordedRun) -> dict[str, str]:
    """Rows of the page's table for one run."""
    return {row[0]: row[1] for row in stability([run]).rows}


@given(
    steps=st.lists(st.integers(0, 5000), min_size=FEWEST_FITTED, max_size=120, unique=True).map(sorted),
    seed=st.integers(0, 999),
)
def test_the_loss_is_fitted_over_the_logarithm_of_the_step_as_numpy_does(steps: list[int], seed: int) -> None:
    losses = np.random.default_rng(seed).normal(3.0, 1.0, len(steps))
    late = [at for at, step in enumerate(steps) if step > FIT_FROM * steps[-1] and step > 0]
    result = fit_of(run_of(steps, loss=losses))
    if len(late) < FEWEST_FITTED:
        assert result is None
        return
    x = np.log10([steps[at] for at in late])
    slope, intercept = np.polyfit(x, losses[late], 1)
    assert result is not None
    assert result["first"] == steps[late[0]]
    assert result["slope"] == pytest.approx(slope, rel=1e-6, abs=1e-9)
    assert result["spread"] == pytest.approx((losses[late] - slope * x - intercept).std(), rel=1e-6)


def test_a_loss_that_falls_by_a_half_with_each_tenfold_is_shown_so() -> None:
    steps = range(1, 1001)
    shown = shown_of(run_of(steps, loss=[4 - 0.5 * math.log10(step) for step in steps]))
    assert shown["loss by a tenfold of steps"] == "-0.500 after step 201"
    assert shown["spread around that line"] == "0.000"


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 6)), min_size=1, max_size=30))
def test_spikes_are_counted_with_the_share_of_one_step_and_the_longest(spikes: list[tuple[int, int]]) -> None:
    means = {"grad_norm_mean": [0.9, 0.75], "grad_norm_lowest": [0.5, 0.25]}
    shown = shown_of(run_of([1, 2], loss=[1, 1], spikes=spikes, **means))
    ones = [length for _, length in spikes if length == 1]
    assert shown["spikes of the gradient norm"] == str(len(spikes))
    assert shown["of one step"] == f"{len(ones) / len(spikes):.0%}"
    assert shown["longest spike, in steps"] == str(max(length for _, length in spikes))
    assert shown["growth over the lowest"] == "3.00 times"


RATES = st.lists(
    st.dictionaries(st.sampled_from([key.removesuffix("_s") for key in PARTS]), st.integers(1, 999), min_size=1),
    min_size=2,
    max_size=2 * SHOWN,
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
    names = {name: key.removesuffix("_s") for key, name in PARTS.items()}
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


TRN1 = {"instance": "trn1.32xlarge", "nodes": 1}


def planned_run(folder: Path, **environment: str) -> Path:
    records = [record(step, step_time_s=0.01 * step, tokens_per_s=1000.0 * step, mfu=0.1) for step in range(1, 8)]
    train = {"steps": 7, "global_batch": 32, "micro_batch": 1, "seq_len": 64}
    return write_run(
        folder,
        records=records,
        starts=[start(0, 7, began=10.0)],
        environment=environment,
        train=train,
        cluster=TRN1,
        model={"preset": "tiny"},
        parallel={"dp": 32},
    )


def test_the_plan_is_that_of_the_command_and_stands_beside_what_was_measured(tmp_path: Path) -> None:
    folder = planned_run(tmp_path / "run", backend="cpu")
    out = output_of("plan", folder / "config.toml", "--json")
    plan = json.loads(out)
    table, sentence = planned(read_run(folder))
    assert table is not None
    rows = {name: cells for name, *cells in table.rows}
    assert table.head == ("", "planned", "measured")
    planned_ms = float(rows["step time"][0].removesuffix(" ms"))
    assert planned_ms == pytest.approx(1e3 * plan["step_time_s"], rel=0.05)
    assert planned_ms > 0
    assert rows["step time"][1] == "40 ms"
    assert rows["tokens/s"][1] == "4,000"
    assert rows["MFU"] == [f"{plan['mfu']:.1%}", "10.0%"]
    assert rows["memory of a rank"] == [f"{plan['bytes']['total'] / (1 << 30):.2f} GiB", "3.00 GiB"]
    assert rows["goodput"][0] == f"{plan['checkpoint']['goodput']:.1%}"
    lasted_h = (2.0 + 0.7 + 0.5 + 0.25 + 0.5) / 3600
    cost = float(rows["cost"][1].removesuffix(" USD"))
    assert cost == pytest.approx(21.50 * lasted_h, rel=0.05)
    assert sentence.startswith("For 1 x trn1.32xlarge; ")
    assert sentence.endswith(" Measured on backend cpu.")


def test_without_a_plan_the_reason_is_told(tmp_path: Path) -> None:
    unnamed = read_run(write_run(tmp_path / "a"))
    assert planned(unnamed) == (None, "There is no plan, since cluster.instance names no machine.")
    unknown = read_run(write_run(tmp_path / "b", cluster={"instance": "abacus.large"}))
    assert planned(unknown)[1].startswith("The plan of this configuration failed: ")
