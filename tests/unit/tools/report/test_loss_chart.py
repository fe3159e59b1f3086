"""The loss curve as text: where the points stand, within the width, in the characters that an output can show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nxtrain.tools.report.figures import _units
from nxtrain.tools.report.loss_chart import ASCII, BRAILLE, NARROWEST, ROWS, WIDEST, Style, loss_chart, main, style_for
from nxtrain.tools.report.run import read_run
from nxtrain.train.kto import Kto
from nxtrain.train.preferences import Preferences
from tests.support.run_folders import record, write_run


def falling(steps: int = 1000, every: int = 10, evaluated: Sequence[int] = (550, 1000)) -> list[dict[str, Any]]:
    """Losses that fall from 8 to 4 in a straight line, and held-out losses on it."""
    results = []
    for step in range(every, steps + 1, every):
        loss = 8.0 - 4.0 * step / steps
        results.append({"step": step, "loss": loss, **({"val_loss": loss} if step in evaluated else {})})
    return results


def plot(chart: str, style: Style) -> list[str]:
    """The rows of the plot, without their labels."""
    rows = [line for line in chart.splitlines() if style.axis in line or style.tick in line][:ROWS]
    return [line[line.index(style.tick if style.tick in line else style.axis) + 1 :] for line in rows]


@pytest.mark.parametrize("style", [BRAILLE, ASCII])
def test_a_straight_fall_is_a_diagonal_with_its_evaluations_on_it(style: Style) -> None:
    chart = loss_chart(falling(), 80, style)
    lines, rows = chart.splitlines(), plot(chart, style)
    assert len(lines) == 1 + ROWS + 2
    assert lines[1].startswith("7.96 ")
    assert lines[ROWS].startswith("4.00 ")
    assert lines[1 + ROWS // 2].startswith("5.98 ")
    assert lines[-1].endswith("step 1000")
    columns = max(map(len, rows))
    for number, row in enumerate(rows):
        begin = len(row) - len(row.lstrip())
        # Row k of ten holds the losses of the k-th tenth of the steps.
        assert begin / columns == pytest.approx(number / ROWS, abs=0.06), chart
        assert len(row) / columns == pytest.approx((number + 1) / ROWS, abs=0.06), chart
    marks = [(x, y) for y, row in enumerate(rows) for x, character in enumerate(row) if character == style.held_out]
    assert [y for _, y in marks] == [ROWS // 2, ROWS - 1]
    assert marks[0][0] == pytest.approx(0.55 * columns, abs=1)
    assert marks[1][0] == columns - 1


def test_each_braille_dot_stands_at_its_own_place() -> None:
    """A fall over two columns of dots and the four rows of a character: dots 1, 2, 5, 6, 3, 7, 8 of the character."""
    chart = loss_chart([{"step": 1, "loss": 40.0}, {"step": 1000, "loss": 0.0}], 80, BRAILLE)
    drawn = {ord(character) - 0x2800 for row in plot(chart, BRAILLE) for character in row.strip()}
    whole = 0
    for bits in drawn:
        whole |= bits
    assert whole == 0xFF
    assert plot(chart, BRAILLE)[0][0] == "\u2809"  # the first two dots are side by side in the first row


@pytest.mark.parametrize("style", [BRAILLE, ASCII])
@pytest.mark.parametrize("width", [10, NARROWEST, 40, 79, WIDEST, 250])
def test_no_line_is_wider_than_the_terminal_nor_than_a_page(style: Style, width: int) -> None:
    lines = loss_chart(falling(), width, style).splitlines()
    assert max(map(len, lines[1:])) == min(width, WIDEST)
    assert len(lines[0]) <= max(width, 54)


def test_a_curve_has_no_holes_where_it_is_steep_or_its_points_are_few() -> None:
    records = [{"step": 1, "loss": 9.0}, {"step": 10, "loss": 2.0}, {"step": 400, "loss": 1.0}]
    rows = plot(loss_chart(records, 80, ASCII), ASCII)
    assert all("*" in row for row in rows)
    columns = max(map(len, rows))
    drawn = [any(x < len(row) and row[x] == "*" for row in rows) for x in range(columns)]
    assert all(drawn)


def test_losses_that_were_not_finite_are_left_out() -> None:
    good = falling()
    bad: list[dict[str, Any]] = [
        {"step": 5, "loss": None},
        {"step": 7, "loss": float("nan"), "val_loss": float("inf")},
        {"loss": 3.0},
        {},
    ]
    assert loss_chart([*bad, *good], 80, BRAILLE) == loss_chart(good, 80, BRAILLE)
    assert loss_chart(bad, 80, BRAILLE) == loss_chart([], 80, BRAILLE) == "no loss is recorded yet"


def test_one_loss_and_equal_losses_have_a_chart() -> None:
    assert "*" in "".join(plot(loss_chart([{"step": 1, "loss": 4.0}], 60, ASCII), ASCII))
    level = plot(loss_chart([{"step": step, "loss": 4.0} for step in range(1, 100)], 60, ASCII), ASCII)
    assert [bool(row.strip()) for row in level].count(True) == 1


@pytest.mark.parametrize(
    ("encoding", "style"),
    [("utf-8", BRAILLE), ("ascii", ASCII), ("latin-1", ASCII), ("cp1252", ASCII), (None, ASCII), ("none such", ASCII)],
)
def test_characters_follow_the_encoding(encoding: str | None, style: Style) -> None:
    assert style_for(encoding) is style


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_command_draws_a_run_folder_within_the_columns(tmp_path: Path, encoding: str) -> None:
    lines = [*map(json.dumps, falling()), '{"torn']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "nxtrain.tools.report.loss_chart", str(tmp_path)],
        env={**os.environ, "COLUMNS": "61", "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    expected = loss_chart(falling(), 60, BRAILLE if encoding == "utf-8" else ASCII)
    assert done.stdout.decode(encoding) == expected + "\n"


def test_a_folder_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"error: {tmp_path / 'metrics.jsonl'} cannot be read: no such file" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: python -m nxtrain.tools.report.loss_chart RUN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("counted", "unit"),
    [(Preferences.sums[1], "mean of the pairs"), (Kto.sums[1], "mean of the answers"), ("targets", "nats per token")],
)
def test_the_unit_of_the_loss_is_that_of_the_objective(tmp_path: Path, counted: str, unit: str) -> None:
    records = [record(step, **{counted: 8}) for step in (1, 2)]
    assert loss_chart(records, 80, ASCII).startswith(f"loss ({unit}): ")
    of_tokens = read_run(write_run(tmp_path / "tokens", records=[record(step) for step in (1, 2)]))
    run = read_run(write_run(tmp_path / "run", records=records))
    assert _units([run, run]) == unit
    assert _units([run, of_tokens]) == " or ".join(dict.fromkeys([unit, "nats per token"]))
