"""`nxtrain report`: read run folders, write their HTML report, and check their parity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.atomic import replace_bytes
from nxtrain.common.run_folder import CONFIG_FILE, METRICS_FILE, REPORT_FILE
from nxtrain.tools.report.comparison import Bounds, parity, scaling
from nxtrain.tools.report.facts import results
from nxtrain.tools.report.page import render
from nxtrain.tools.report.run import RecordedRun, read_runs


@dataclass(frozen=True)
class Reported:
    """Result of `nxtrain report`: file, lines for the terminal, and data for `--json`."""

    file: Path
    lines: tuple[str, ...]
    content: dict[str, Any]  # content of `--json`
    passed: bool  # False if a run is outside the bounds of parity


def report(
    folders: Sequence[Path],
    out: Path | None = None,
    *,
    bounds: Bounds | None = None,
    scales: bool = False,
    price_usd_h: float | None = None,
) -> Reported:
    """Write the HTML report of one or more runs.

    Args:
        folders: Run folders.
        out: File to write; None: `report.html` in the first folder.
        bounds: Bounds for comparing each run with the first; None: runs are not compared.
        scales: Compare throughput over the number of nodes.
        price_usd_h: Price of one machine in USD per hour; None: the price in the table of machines.
    """
    if bounds is not None and len(folders) < 2:  # noqa: PLR2004 - a run and another
        raise ConfigError("--parity compares runs with the first; name two run folders or more")
    runs = read_runs(folders)
    parities: list[dict[str, Any]] = []
    if bounds is not None:
        parities = [parity(runs[0], other, bounds) for other in runs[1:]]
    points: list[dict[str, Any]] = []
    notes: list[str] = []
    if scales:
        points, notes = scaling(runs, price_usd_h)
    if out is None:
        _require_run(runs[0])
    file = out or folders[0] / REPORT_FILE
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent} for {file.name}; make it first, or give another --out")
    page = render(runs, parities=parities, points=points, notes=notes)
    replace_bytes(file, page.encode(errors="replace"), durable=False)  # a folder may have a name that is not UTF-8
    content: dict[str, Any] = {"out": str(file), "runs": [results(run) for run in runs]}
    if parities:
        content["parity"] = parities
    if scales:
        content["scaling"] = points

    lines = []
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        lines += [prefix + note for note in run.notes]
    lines += notes
    verdicts = {True: "pass", False: "FAIL"}
    for compared in parities:
        lines.append(f"parity of {compared['other']} with {compared['first']}: {verdicts[compared['passed']]}")
        lines += [f"  {verdicts[check['passed']]}  {check['name']}: {check['text']}" for check in compared["checks"]]
        lines += [f"  {note}" for note in compared["notes"]]
    for point in points:
        machine = f" x {point['instance']}" if point["instance"] else " nodes"
        line = f"{point['name']}: {point['nodes']}{machine}, {point['tokens_per_s']:,.0f} tokens/s"
        line += f", efficiency {point['efficiency']:.1%}"
        if point["tokens_per_usd"]:
            line += f", {point['tokens_per_usd']:,.0f} tokens per dollar"
        lines.append(line)
    passed = all(compared["passed"] for compared in parities)
    return Reported(file, (*lines, f"report: {file}"), content, passed)


def _require_run(run: RecordedRun) -> None:
    """Raise a ConfigError for a folder that has other files only; an empty folder is a run before its start."""
    entries = list(run.folder.iterdir())
    if len(run.columns.steps) or run.starts or run.config or not entries:
        return
    inside = sorted(item for item in entries if (item / CONFIG_FILE).is_file() or (item / METRICS_FILE).is_file())
    way_out = "name the folder of a run, which is the value of run.dir"
    if inside:
        way_out = f"name a run inside, such as {inside[0]}"
    raise ConfigError(f"{run.folder} is not a run folder of nxtrain; {way_out}, or give --out FILE.html")
