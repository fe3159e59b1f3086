"""Plan beside measurement: the planner's own figures, and the medians of the records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxtrain.tools.report.facts import planned
from nxtrain.tools.report.run import read_run
from tests.support.commands import in_process
from tests.support.run_folders import record, start, write_run

TRN1 = {"instance": "trn1.32xlarge", "nodes": 1}


def run_of(folder: Path, **environment: str) -> Path:
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
    folder = run_of(tmp_path / "run", backend="cpu")
    code, out, err = in_process("plan", folder / "config.toml", "--json")
    assert code == 0, err
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
