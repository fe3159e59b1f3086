"""Drawn defects in files of pairs and of labelled answers: each is an error of a file and a row, never of a program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.commands import in_process
from tests.support.corpora import write_tokenizer

PAIR = {"prompt": "snow ", "chosen": "and", "rejected": "end"}
ANSWER = {"prompt": "snow ", "completion": "and", "label": True}

VALUES: tuple[Any, ...] = (None, 3, 1e400, {}, [], [[]], [{"role": "x"}], "", " \n", "\ud800", {"a": [1]}, [None])
"""Values that no field of a row may hold, not even `label`."""


def wrong_value(rng: Random, row: dict[str, Any]) -> bytes:
    return json.dumps({**row, rng.choice([*row][1:]): rng.choice(VALUES)}).encode()


def no_field(rng: Random, row: dict[str, Any]) -> bytes:
    left_out = rng.choice([*row][1:])
    return json.dumps({name: value for name, value in row.items() if name != left_out}).encode()


def no_object(rng: Random, row: dict[str, Any]) -> bytes:
    return rng.choice([b"3", b"[]", b"null", b'"text"', b"[" * 100_000, b"true", b"NaN", b"-"])


def cut(rng: Random, row: dict[str, Any]) -> bytes:
    line = json.dumps(row).encode()
    return line[: rng.randrange(1, len(line))]


def no_text(rng: Random, row: dict[str, Any]) -> bytes:
    line = bytearray(json.dumps(row).encode())
    at = rng.randrange(len(line))
    return bytes(line[:at] + rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80"]) + line[at:])


DEFECTS: tuple[Callable[[Random, dict[str, Any]], bytes], ...] = (wrong_value, no_field, no_object, cut, no_text)


@pytest.mark.parametrize(("option", "row"), [("--pairs", PAIR), ("--labels", ANSWER)])
def test_a_defect_names_its_file_and_row(option: str, row: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, rng = write_tokenizer(tmp_path / "tokenizer", 300), Random(option)
    source = tmp_path / "rows.jsonl"
    for draw in range(40):
        defect = DEFECTS[draw % len(DEFECTS)]
        number = rng.randint(1, 5)
        lines = [json.dumps(row).encode() for _ in range(5)]
        lines[number - 1] = defect(rng, row)
        source.write_bytes(b"\n".join(lines))
        out = tmp_path / f"{draw}.arrow"
        code, _, said = in_process("data", "prepare", source, option, "--tokenizer", tokenizer, "--out", out)
        text = " ".join(said.split())
        assert code == 3 and f"{source}, row {number}: " in text, (defect, lines[number - 1][:200], said)
        assert "Traceback" not in said and not out.exists()
