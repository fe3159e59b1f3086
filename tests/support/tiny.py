"""The smallest run that commands start in tests: one table of values, and a file of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.runs import QUIET, SEQ_LEN, token_file

FILE = "config.toml"

TINY: dict[str, dict[str, Any]] = {
    "model": {"preset": "tiny"},
    "train": {"steps": 12, "seq_len": SEQ_LEN, "global_batch": 2, "micro_batch": 1, "eval_every": 0},
    "data": {"source": "tokens"},
    "metrics": QUIET,
    "backend": {"name": "cpu"},
}
"""One rank, every step logged."""


def write_toml(folder: Path, *, num_rows: int = 18, **sections: Mapping[str, Any]) -> Path:
    """Write the configuration of a run in `folder/run`, and its random rows.

    Args:
        folder: For both; made where it is absent.
        num_rows: Of the data.
        sections: Override the tables of `TINY`.
    """
    folder.mkdir(exist_ok=True)
    tables = {"run": {"dir": folder / "run"}, **{name: dict(table) for name, table in TINY.items()}}
    tables["data"]["path"] = folder / "rows.npy"
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    if tables["data"]["path"] == folder / "rows.npy":
        token_file(folder / "rows.npy", num_rows)
    path = folder / FILE
    path.write_text("\n".join(_lines(tables)) + "\n", encoding="utf-8")
    return path


def _lines(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = []
    for name, table in tables.items():
        found.append(f"[{name}]")
        for key, value in table.items():
            inner = value.items() if isinstance(value, Mapping) else [("", value)]
            found += [f"{key}.{own} = {_text(one)}" if own else f"{key} = {_text(one)}" for own, one in inner]
    return found


def _text(value: object) -> str:
    return json.dumps(str(value) if isinstance(value, Path) else value)  # the same in TOML for these types
