"""The commands of the command line, kept once built: each run would build the parameters of all, in 60 of its 70 ms."""

from __future__ import annotations

import functools

import typer.main

typer.main.get_command = functools.cache(typer.main.get_command)


def build() -> None:
    """Build the commands of nxtrain, which forks of this process then have."""
    from nxtrain.cli.main import app

    typer.main.get_command(app)
