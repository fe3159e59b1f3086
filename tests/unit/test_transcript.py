"""Help texts and exit codes of every command are those of `tests/golden/transcript.json`.

Scripts outside this repository rely on them. `python -m tests.unit.test_transcript` records the file again after a
change that is meant.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

GOLDEN = Path(__file__).parents[1] / "golden" / "transcript.json"
TINY = "configs/tiny_cpu.toml"
CALLS = (
    ("config", "show", TINY),
    ("config", "keys"),
    ("config", "show", TINY, "train.steps=0"),
    ("config", "show", TINY, "train.stepz=3", "parallel.tp=two"),
    ("config", "show", "absent.toml"),
    ("train",),
    ("train", TINY, "backend.name=tpu"),
    ("launch", TINY, "--nproc", "2", "--dry-run"),
    ("launch", TINY, "--nproc", "0"),
    ("graphs", TINY),
    ("cache", "ls", "absent"),
    ("convert", "hf-to-nxtrain", "absent", "other"),
    ("convert", "nxtrain-to-hf", "absent", "other"),
    ("data", "prepare", "absent", "--out", "absent.arrow"),
    ("data", "inspect", "absent"),
    ("generate", "absent", "--prompt", "x"),
    ("eval", "absent"),
    ("bench", "nothing"),
    ("nothing",),
)
"""Calls that start no run; those that are refused print a line, and those of `config` a configuration."""


def helps(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The `--help` of a command and of all below it."""
    yield (*words, "--help")
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from helps(child, (*words, name))


def answer(app: typer.Typer, argv: tuple[str, ...]) -> dict[str, Any]:
    """Exit code of a call, and the words of its help."""
    result = CliRunner().invoke(app, list(argv), env={"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"})
    code = getattr(result.exception, "exit_code", result.exit_code)
    return {"code": code, "help": words(result.output)} if argv[-1] == "--help" else {"code": code}


def words(text: str) -> str:
    """A help without the frames that rich draws, which differ between its releases."""
    return " ".join(re.sub(r"[^\x20-\x7e\n]", " ", text).split())


def transcript(app: typer.Typer) -> dict[str, Any]:
    return {" ".join(argv): answer(app, argv) for argv in (*helps(typer.main.get_command(app)), *CALLS)}


def test_help_texts_and_exit_codes_are_the_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from nxtrain.cli.main import app

    monkeypatch.chdir(GOLDEN.parents[2])
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    actual = transcript(app)
    assert set(actual) == set(expected)
    for call, want in expected.items():
        assert actual[call] == want, call


def test_every_help_has_an_example_and_no_bounds_of_memory_or_brackets_in_brackets() -> None:
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    helped = {call: answered["help"] for call, answered in recorded.items() if "help" in answered}
    assert len(helped) > 35
    groups = {call for call, text in helped.items() if "COMMAND [ARGS]" in text}
    assert {call for call, text in helped.items() if "Example: " not in text} <= groups
    assert len(groups) < 8
    odd = {call: re.findall(r"<=x|range|\[\[|\]\]|\.\.\.\.", text) for call, text in helped.items()}
    assert {call: result for call, result in odd.items() if result} == {}


if __name__ == "__main__":
    from nxtrain.cli.main import app as cli

    GOLDEN.write_text(json.dumps(transcript(cli), indent=1) + "\n", encoding="utf-8")
    sys.exit(0)
