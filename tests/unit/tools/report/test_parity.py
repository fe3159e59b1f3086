"""Parity and scaling of runs, and the command's exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.tools.report.comparison import FEWEST, WINDOWS, Bounds, parity, scaling, window_means
from nxtrain.tools.report.run import RecordedRun, read_run
from tests.support.commands import output_of
from tests.support.run_folders import record, write_run


@given(st.lists(st.floats(0.5, 9), min_size=1, max_size=90))
def test_windows_have_the_means_of_their_records(values: list[float]) -> None:
    size = max(1, len(values) // WINDOWS)
    pieces = [values[at : at + size] for at in range(0, len(values) // size * size, size)]
    pieces[-1] += values[len(pieces) * size :]
    np.testing.assert_allclose(window_means(np.array(values)), [np.mean(piece) for piece in pieces])


def run_with(folder: Path, *, steps: int = 60, **factors: Any) -> RecordedRun:
    """A run whose numbers are those of `record`, times the given factors from step 31 on."""
    records = [record(step) for step in range(1, steps + 1)]
    changed = [
        item | {key: item[key] * factor for key, factor in factors.items()} if item["step"] > 30 else item
        for item in records
    ]
    return read_run(write_run(folder, steps=steps, records=changed))


@pytest.mark.parametrize("key", ["loss", "grad_norm", "lr", "tokens"])
@pytest.mark.parametrize("share", [0.5, 0.99, 1.01, 3.0])
def test_parity_holds_up_to_its_bound(tmp_path: Path, key: str, share: float) -> None:
    bound = {"loss": 0.01, "grad_norm": 0.1}.get(key, 1e-6)
    first = run_with(tmp_path / "a")
    # A relative difference d is one of d times the larger number.
    factors: dict[str, Any] = {key: 1 / (1 - share * bound)}
    other = run_with(tmp_path / "b", **factors)
    result = parity(first, other, Bounds())
    assert result["passed"] is (share <= 1)
    assert [check["name"] for check in result["checks"] if not check["passed"]] == [
        {"loss": "training loss", "grad_norm": "gradient norm", "lr": "learning rate", "tokens": "tokens"}[key]
    ] * (share > 1)
    worst = next(check for check in result["checks"] if check["bound"] == bound and check["value"])
    assert worst["value"] == pytest.approx(share * bound, rel=1e-6)


def test_runs_of_different_lengths_are_compared_where_both_are(tmp_path: Path) -> None:
    assert parity(run_with(tmp_path / "a"), run_with(tmp_path / "b", steps=30), Bounds())["passed"]


def test_too_few_common_records_fail(tmp_path: Path) -> None:
    result = parity(run_with(tmp_path / "a"), run_with(tmp_path / "b", steps=FEWEST - 1), Bounds())
    assert not result["passed"]
    assert "records of the same steps, and 5 are needed" in result["checks"][0]["text"]


def test_steps_that_one_run_alone_skipped_fail(tmp_path: Path) -> None:
    records = [record(step, **({"skipped_steps": [7]} if step == 7 else {})) for step in range(1, 61)]
    other = read_run(write_run(tmp_path / "b", records=records))
    assert not parity(run_with(tmp_path / "a"), other, Bounds())["passed"]
    assert parity(other, other, Bounds())["passed"]


def test_a_differing_seed_is_said(tmp_path: Path) -> None:
    other = read_run(write_run(tmp_path / "b", run={"seed": 5}))
    assert "run.seed differs: 0 and 5" in parity(run_with(tmp_path / "a"), other, Bounds())["notes"]


def test_the_command_ends_with_0_or_6(tmp_path: Path) -> None:
    first, same = run_with(tmp_path / "a").folder, run_with(tmp_path / "b").folder
    far = run_with(tmp_path / "c", loss=1.5).folder
    output_of("report", first, same, "--parity")
    assert "FAIL  training loss: at most 0.333 apart" in output_of("report", first, far, "--parity", code=6)
    output_of("report", first, far, "--parity", "--loss-bound", "0.5")
    output_of("report", first, far)


def test_json_has_the_results(tmp_path: Path) -> None:
    first, far = write_run(tmp_path / "a"), run_with(tmp_path / "c", loss=1.5).folder
    out = tmp_path / "page.html"
    result = json.loads(output_of("report", first, far, "--parity", "--scaling", "--json", "--out", out, code=6))
    assert result["out"] == str(tmp_path / "page.html")
    assert [run["step"] for run in result["runs"]] == [60, 60]
    assert result["runs"][0]["goodput"]["lost_steps"] == 10
    assert result["runs"][0]["spikes"] == result["runs"][0]["spikes_of_one_step"] == 1
    assert result["parity"][0]["passed"] is False
    assert [point["nodes"] for point in result["scaling"]] == [1, 1]


def test_efficiency_is_throughput_per_node_beside_that_of_the_smallest_run(tmp_path: Path) -> None:
    def at(nodes: int, speed: float, instance: str) -> RecordedRun:
        records = [record(step, tokens_per_s=speed) for step in (1, 2, 3)]
        folder = write_run(
            tmp_path / f"{instance}{nodes}", records=records, cluster={"nodes": nodes, "instance": instance}
        )
        return read_run(folder)

    runs = [at(64, 5800.0, "trn1.32xlarge"), at(1, 100.0, "trn1.32xlarge"), at(8, 4000.0, "own")]
    points, notes = scaling([*runs, read_run(write_run(tmp_path / "none", records=[]))])
    assert [(point["nodes"], round(point["efficiency"], 6)) for point in points] == [(1, 1.0), (8, 1.0), (64, 0.90625)]
    assert [point["tokens_per_usd"] for point in points] == [
        pytest.approx(100 * 3600 / 21.50),
        None,
        pytest.approx(5800 * 3600 / (21.50 * 64)),
    ]
    assert notes == ["run is left out: it has no throughput, or no cluster.nodes"]
    assert scaling(runs, price_usd_h=2.0)[0][1]["tokens_per_usd"] == pytest.approx(4000 * 3600 / 16)


def test_the_published_scaling_table_has_the_efficiencies_of_the_report(tmp_path: Path) -> None:
    """`docs/alternatives.md` shows minutes of a job by its instances; throughput is their reciprocal."""
    page = (Path(__file__).parents[4] / "docs" / "alternatives.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| (\d+)% \|$", page, re.MULTILINE)
    assert [(int(nodes), float(minutes)) for nodes, minutes, _, _ in rows] == [(1, 99), (2, 55), (4, 27), (8, 13.5)]
    runs = []
    for nodes, minutes, _, _ in rows:
        records = [record(step, tokens_per_s=1e6 / float(minutes)) for step in range(1, 4)]
        runs.append(read_run(write_run(tmp_path / f"n{nodes}", records=records, cluster={"nodes": int(nodes)})))
    points, _ = scaling(runs)
    for point, (nodes, minutes, speedup, efficiency) in zip(points, rows, strict=True):
        assert point["nodes"] == int(nodes)
        assert float(speedup) == pytest.approx(99 / float(minutes), abs=0.05)
        assert point["efficiency"] == pytest.approx(int(efficiency) / 100, abs=0.006)
