"""Commands `nxtrain report` and `nxtrain watch`; each imports its implementation when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nxtrain.cli.options import AsJson, number
from nxtrain.common.errors import DivergedError
from nxtrain.common.io.paths import local_path
from nxtrain.common.process.document import write_document
from nxtrain.config.bounds import MAX_SIZE

EPILOG = "Example: nxtrain report runs/trainium runs/gpu --parity"

WATCH_EPILOG = "Example: nxtrain watch runs/demo"

RunDirs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN_DIR", help="Run folders.", show_default=False, parser=local_path),
]


def report(
    runs: RunDirs,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="By default report.html in the first RUN_DIR.", parser=local_path),
    ] = None,
    parity: Annotated[bool, typer.Option("--parity", help="Compare runs with the first: exit code 0, or 6.")] = False,
    loss_bound: Annotated[float, number(0, 10, help="Largest relative difference of losses that passes.")] = 0.01,
    norm_bound: Annotated[
        float, number(0, 10, help="Largest relative difference of gradient norms that passes.")
    ] = 0.1,
    scaling: Annotated[bool, typer.Option("--scaling", help="Efficiency over nodes, and tokens per dollar.")] = False,
    price: Annotated[float | None, number(0, MAX_SIZE, help="USD per machine and hour.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about runs: curves, stability, goodput, plan and configuration.

    The page also reports runs that are still training, and damaged run folders.
    """
    from nxtrain.tools.report.command import report as write_report
    from nxtrain.tools.report.comparison import Bounds

    bounds = None
    if parity:
        bounds = Bounds(loss_bound, norm_bound)
    done = write_report(runs, out, bounds=bounds, scales=scaling, price_usd_h=price)
    if as_json:
        write_document(done.content)
    else:
        typer.echo("\n".join(done.lines))
    if not done.passed:
        raise typer.Exit(DivergedError.exit_code)


def watch(
    runs: RunDirs,
    once: Annotated[bool, typer.Option("--once", help="Show the lines once.")] = False,
    every_s: Annotated[
        float,
        number(0, 86_400, "--every", help="Seconds between updates; 0: by the terminal."),
    ] = 0.0,
) -> None:
    """Print the progress of runs from their files, one line per run, until all runs have ended."""
    from nxtrain.tools.report.watch import watch as follow

    follow(runs, once=once, every_s=every_s)
