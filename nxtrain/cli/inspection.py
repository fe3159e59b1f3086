"""Command `nxtrain inspect`, which shows a model's parameters and shards; it imports its implementation lazily."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nxtrain.cli.options import AsJson, Overrides, integer
from nxtrain.common.io.paths import local_path
from nxtrain.common.process.document import write_document
from nxtrain.config.bounds import MAX_RANKS

EPILOG = "Example: nxtrain inspect configs/llama2_70b_trn1.toml model.preset=llama3.1-405b parallel.dp=8 --tree"

ConfigOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG_OR_RUN", help="TOML file, or the folder of a run.", show_default=False, parser=local_path
    ),
]


def inspect_model(
    path: ConfigOrRun,
    overrides: Overrides = None,
    tree: Annotated[bool, typer.Option("--tree", help="List every parameter; equal blocks are listed once.")] = False,
    rank: Annotated[
        int | None, integer(0, MAX_RANKS, help="Show one rank in place of the first of every pipeline stage.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print gathers, passes and reductions of a sharded step, in order.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a model, its pipeline stages, units and shards, and the bytes per rank; for a run, also its checkpoint.

    No model is built, so a model of any size takes a second and little memory. --trace runs one step on tensors without
    storage, and prints its collectives and passes only.
    """
    from nxtrain.plan.inspection import inspect
    from nxtrain.plan.show_inspection import show_inspection

    inspection = inspect(path, overrides or [])
    if trace:
        from nxtrain.tools.trace.step_trace import trace_step

        events = trace_step(inspection.resolved, inspection.job)
        if as_json:
            write_document({"events": events})
        else:
            typer.echo("\n".join(f"{number:3}  {event}" for number, event in enumerate(events, 1)))
        return
    if as_json:
        write_document(inspection.to_json(rank))
    else:
        show_inspection(inspection, rank, tree=tree)
