"""Command `nxtrain doctor`, which checks this machine for training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nxtrain.cli.options import AsJson, Overrides, integer
from nxtrain.common.errors import ConfigError
from nxtrain.common.io.paths import local_path
from nxtrain.common.process.document import write_document
from nxtrain.config.bounds import MAX_RANKS

EPILOG = "Example: nxtrain doctor configs/llama2_7b_trn1.toml --collectives"


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="Run that is to start now.", show_default=False, parser=local_path),
    ] = None,
    overrides: Overrides = None,
    collectives: Annotated[
        bool,
        typer.Option("--collectives", help="Test the links, too, between processes or with --first-node machines."),
    ] = False,
    first_node: Annotated[
        str, typer.Option(metavar="NAME[:PORT]", help="With --collectives on several machines: the one of rank 0.")
    ] = "",
    rank: Annotated[
        int,
        integer(0, MAX_RANKS, envvar=["RANK", "SLURM_PROCID"], help="With --first-node: this machine."),
    ] = 0,
    world: Annotated[
        int, integer(1, MAX_RANKS, envvar=["WORLD_SIZE", "SLURM_NTASKS"], help="With --first-node: all.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Check this machine before a run, or between runs: devices, network, limits, disks, clock, packages.

    The exit code is 0 without a fault, and 5 with faults. Each fault is printed with its consequence and a fix. Without
    CONFIG the machine is checked for any run, and a running job is not a fault, as for a health check.
    """
    from nxtrain.tools.doctor.collectives import world_of
    from nxtrain.tools.doctor.examine import EXIT_CODE, examine, line_of, to_json

    if first_node and not collectives:
        raise ConfigError("--first-node has an effect on the test of network links only; add --collectives")
    meeting = None
    if first_node:
        meeting = world_of(first_node, rank, world)
    findings = []
    for finding in examine(config, overrides or [], collectives=collectives, world=meeting):
        findings.append(finding)
        if not as_json:
            typer.echo(line_of(finding))
    if as_json:
        write_document(to_json(findings))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(EXIT_CODE)
