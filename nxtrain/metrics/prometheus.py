"""Newest record of a run as a file in Prometheus' text format, for the textfile collector of its node exporter.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxtrain.common.io.atomic import replace_text

PREFIX = "nxtrain_"


class PrometheusSink:
    """File with a gauge for each number of the newest record; a reader never sees a part of the file."""

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run

    def log(self, record: Mapping[str, Any]) -> None:
        """Replace the file."""
        replace_text(self._path, text_of(record, self._run), durable=False)

    def close(self) -> None:
        """Do nothing: the last record stays in the file."""


def text_of(record: Mapping[str, Any], run: str) -> str:
    """Text of a record in Prometheus' format; values that are not numbers are left out."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = []
    for key, value in record.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            name = PREFIX + re.sub("[^a-zA-Z0-9_]", "_", key)
            lines += [f"# TYPE {name} gauge", f'{name}{{run="{label}"}} {_number(float(value))}']
    return "".join(f"{line}\n" for line in lines)


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    if math.isnan(value):
        return "NaN"
    if value > 0:
        return "+Inf"
    return "-Inf"
