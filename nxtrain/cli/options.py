"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from nxtrain.common.io.paths import local_path
from nxtrain.common.process.document import reserve_output
from nxtrain.config.bounds import MAX_SIZE, quoted

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file.", show_default=False, parser=local_path)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that win over the file's; the value is TOML or a bare word."),
]
FirstNode = Annotated[
    str, typer.Option(metavar="NAME[:PORT]", help="With cluster.nodes above 1: one of them; the same on all.")
]


def _reserve(wanted: bool) -> bool:
    if wanted:
        reserve_output()
    return wanted


AsJson = Annotated[bool, typer.Option("--json", callback=_reserve, help="Print JSON.")]
"""Option --json of a command that writes its result by `write_document`."""


def integer(least: int = 1, most: int = MAX_SIZE, *names: str, **settings: Any) -> Any:
    """Declare a command line option with an integer value; its help text shows no bounds.

    Args:
        least, most: Smallest and largest allowed value.
        names: Names of the option; by default the name of the parameter.
        settings: Arguments of `typer.Option`.
    """
    return typer.Option(*names, parser=bounded(int, least, most), metavar="N", **settings)


def number(least: float, most: float, *names: str, **settings: Any) -> Any:
    """Declare a command line option with a floating point value; see `integer`."""
    return typer.Option(*names, parser=bounded(float, least, most), metavar="X", **settings)


def bounded(kind: type[int | float], least: float, most: float) -> Callable[[str], float]:
    """Return a parser of numbers from `least` to `most`, both included."""
    name = "number"
    if kind is int:
        name = "integer"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError as error:
            raise typer.BadParameter(f"{quoted(text)} is not a valid {name}") from error
        if not least <= value <= most:  # nor nan
            raise typer.BadParameter(f"{quoted(text)} is not between {least} and {most}")
        return value

    return parse
