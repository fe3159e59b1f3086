"""Command `nxtrain inspect`; the implementation is imported when the command is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nxtrain.cli.options import AsJson, Overrides, integer
from nxtrain.config.bounds import MAX_RANKS
from nxtrain.io.paths import local_path
from nxtrain.process.document import write_document

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
    as_json: AsJson = False,
) -> None:
    """Show a model, its pipeline stages, units and shards, and the bytes of a rank; of a run also its checkpoint.

    Nothing is built: a model of any size takes a second and no memory.
    """
    from nxtrain.plan.inspection import inspect
    from nxtrain.plan.show_inspection import show_inspection

    found = inspect(path, overrides or [])
    if as_json:
        write_document(found.to_json(rank))
    else:
        show_inspection(found, rank, tree=tree)
