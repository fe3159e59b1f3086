"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nxtrain.io.paths import local_path

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file.", show_default=False, parser=local_path)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over the file's; the value is TOML or a bare word."),
]
