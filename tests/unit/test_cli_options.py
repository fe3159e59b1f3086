"""Numbers of options: those within the bounds are taken, and all others are refused with their bounds."""

from __future__ import annotations

import re
from typing import Annotated

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nxtrain.cli import main
from nxtrain.cli.options import integer, number

FEW = st.integers(-9, 9)


def taken(kind: type, text: str, least: int, most: int) -> float | None:
    """Number that a command gets from its option; None if the option refuses the text."""
    app, found = typer.Typer(), list[float]()

    def command(some: float = 0) -> None:
        found.append(some)

    command.__annotations__["some"] = Annotated[kind, (integer if kind is int else number)(least, most)]
    app.command()(command)
    done = CliRunner().invoke(app, [f"--some={text}"])
    assert done.exit_code == (0 if found else 2), done.output
    assert found or "Invalid value for '--some'" in done.output
    return found[0] if found else None


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
