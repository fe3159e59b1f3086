"""`nxtrain report`: read run folders, write their page, and judge their parity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.atomic import replace_text
from nxtrain.common.run_folder import REPORT_FILE
from nxtrain.tools.report.facts import results
from nxtrain.tools.report.page import render
from nxtrain.tools.report.parity import Bounds, Parity, compare
from nxtrain.tools.report.run import read_runs
from nxtrain.tools.report.scaling import Point, scaling


@dataclass(frozen=True)
class Reported:
    """Result of a report.

    Args:
        file: The page.
        lines: Text for people.
        content: Content of `--json`.
        passed: False if a run is outside the bounds of parity.
    """

    file: Path
    lines: tuple[str, ...]
    content: dict[str, Any]
    passed: bool


def report(
    folders: Sequence[Path],
    out: Path | None = None,
    *,
    bounds: Bounds | None = None,
    scales: bool = False,
    price_usd_h: float | None = None,
) -> Reported:
    """Write the page of some runs.

    Args:
        folders: Run folders.
        out: File to write; None: `report.html` in the first folder.
        bounds: Compare each run with the first by these bounds; None: do not.
        scales: Compare the runs over their nodes.
        price_usd_h: Price of a machine's hour; None: that of the table of machines.

    Raises:
        ConfigError: A folder does not exist, or parity lacks a second run.
        OSError: The page cannot be written.
    """
    if bounds is not None and len(folders) < 2:  # noqa: PLR2004 - a run and another
        raise ConfigError("--parity compares runs with the first; name two run folders or more")
    runs = read_runs(folders)
    parities = compare(runs, bounds) if bounds is not None else []
    points, notes = scaling(runs, price_usd_h) if scales else ([], [])
    file = out or folders[0] / REPORT_FILE
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent} for {file.name}; make it first, or give another --out")
    replace_text(file, render(runs, parities=parities, points=points, notes=notes), durable=False)
    lines = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes] + notes
    lines += [line for each in parities for line in _lines(each)]
    lines += [_line(point) for point in points]
    content = {
        "out": str(file),
        "runs": [results(run) for run in runs],
        **({"parity": [each.to_json() for each in parities]} if parities else {}),
        **({"scaling": [point.to_json() for point in points]} if scales else {}),
    }
    return Reported(file, (*lines, f"report: {file}"), content, all(each.passed for each in parities))


def _lines(parity: Parity) -> list[str]:
    verdict = "pass" if parity.passed else "FAIL"
    checks = [f"  {'pass' if each.passed else 'FAIL'}  {each.name}: {each.text}" for each in parity.checks]
    return [f"parity of {parity.other} with {parity.first}: {verdict}", *checks, *(f"  {n}" for n in parity.notes)]


def _line(point: Point) -> str:
    machine = f" x {point.instance}" if point.instance else " nodes"
    cost = f", {point.tokens_per_usd:,.0f} tokens per dollar" if point.tokens_per_usd else ""
    return (
        f"{point.name}: {point.nodes}{machine}, {point.tokens_per_s:,.0f} tokens/s, efficiency "
        f"{point.efficiency:.1%}{cost}"
    )
