"""Numbers of options are held to their bounds, and `--json` leaves standard output to one document."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nxtrain.cli import main
from nxtrain.cli.main import app
from nxtrain.cli.options import AsJson, integer, number

FEW = st.integers(-9, 9)


def taken(kind: type, text: str, least: int, most: int) -> float | None:
    """Number that a command gets from its option; None if the option refuses the text."""
    app, result = typer.Typer(), list[float]()

    def command(some: float = 0) -> None:
        result.append(some)

    command.__annotations__["some"] = Annotated[kind, (integer if kind is int else number)(least, most)]
    app.command()(command)
    done = CliRunner().invoke(app, [f"--some={text}"])
    assert done.exit_code == (0 if result else 2), done.output
    assert result or "Invalid value for '--some'" in done.output
    return result[0] if result else None


@given(value=st.integers() | FEW, least=FEW, most=FEW)
def test_an_integer_is_taken_within_its_bounds(value: int, least: int, most: int) -> None:
    assert taken(int, str(value), least, most) == (value if least <= value <= most else None)


@given(value=st.floats() | st.floats(-9, 9), least=FEW, most=FEW)
def test_a_number_is_taken_within_its_bounds(value: float, least: int, most: int) -> None:
    assert taken(float, str(value), least, most) == (value if least <= value <= most else None)


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", "nan", "0x10", "9" * 5000])
def test_what_is_no_integer_is_refused(text: str) -> None:
    assert taken(int, text, 0, 10) is None


def test_only_the_terminal_breaks_the_lines_of_a_paragraph_of_help() -> None:
    apps = [main.app, *(group.typer_instance for group in main.app.registered_groups if group.typer_instance)]
    helps = [command.help for app in apps for command in app.registered_commands]
    assert len(helps) > 30
    assert all(text and not re.search(r"[^\n]\n[^\n]", text) for text in helps)


NOISY = """
import ctypes, json, os, subprocess, sys
from typer.main import get_command
import nxtrain.cli.main as cli
from nxtrain.common.process.document import write_document

def noise():
    libc = ctypes.CDLL(None)
    print("of a library")
    os.write(1, b"of a descriptor\\n")
    libc.printf(b"of C, whose buffer is written at the exit\\n")
    subprocess.run(["echo", "of a child"], check=True)
    sys.__stdout__.write("of the first stream\\n")

def command(as_json: cli.AsJson = False):
    noise()
    write_document({"caf\\u00e9": [1, None]})
    noise()

cli.app.command("noisy")(command)
cli.main()
"""


def test_nothing_but_the_document_is_on_standard_output(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    argv = [sys.executable, str(tmp_path / "noisy.py"), "noisy"]
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout) == {"caf\xe9": [1, None]}
    kinds = ("of a library", "of a descriptor", "of C,", "of a child", "of the first stream")
    assert [done.stderr.count(kind) for kind in kinds] == [2] * len(kinds)
    # Without the option the same noise is on standard output, so that the test can fail.
    plain = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True)
    assert [plain.stdout.count(kind) for kind in kinds] == [2] * len(kinds)


def options(commands: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """Commands with `--json`, as words, and the annotation of the option."""
    for command in commands.registered_commands:
        assert command.callback is not None
        for parameter in typer.utils.get_params_from_function(command.callback).values():
            default = parameter.default
            if "--json" in (getattr(default, "param_decls", None) or ()):
                yield " ".join((*path, command.name or command.callback.__name__)), default
    for group in commands.registered_groups:
        assert group.typer_instance is not None
        yield from options(group.typer_instance, (*path, str(group.name)))


def test_every_json_option_reserves_standard_output() -> None:
    result = dict(options(app))
    assert {"eval", "generate", "plan", "doctor", "graphs", "report", "config show", "cache ls"} <= set(result)
    assert len(result) > 15
    shared = AsJson.__metadata__[0]  # type: ignore[attr-defined]
    for command, option in result.items():
        assert getattr(option, "callback", None) is shared.callback, command
