"""Drawn runs through `nxtrain launch`, from a Hugging Face folder and a token file, beside transformers."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support import ROOT, TINY, commands, forked_python
from tests.support.command_ranks import train_as_launched
from tests.support.drawn import SEED, Drawn, draw, one_in
from tests.support.drawn_runs import LIMIT_S, error_of_command, prepare
from tests.support.layouts import covering_array

LAUNCHED = (0, 1)
"""Draws of one rank and of two that the command starts; the ranks of the others start as the command renders them."""

NAME = str(TINY.relative_to(ROOT))

LAYOUTS = covering_array(SEED + 1, 64, lambda degrees: degrees.world <= 4)[:6]
CONTEXT = covering_array(SEED + 1, 6, lambda degrees: degrees.world <= 4, cp=True)[:6]


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_command_trains_as_transformers_does(tmp_path: Path, index: int) -> None:
    check(tmp_path, draw("command", SEED, index, LAYOUTS[index]), launches=index in LAUNCHED)


@pytest.mark.parametrize("index", one_in(2, range(len(CONTEXT))), ids=lambda index: f"{index}-{CONTEXT[index]}")
def test_a_drawn_command_with_context_parallelism_does_too(tmp_path: Path, index: int) -> None:
    check(tmp_path, draw("command-cp", SEED, index, CONTEXT[index]), launches=index == 0)


EXPERTS = covering_array(SEED + 2, 64, lambda degrees: degrees.world == 2)[:4]
DIVIDED = covering_array(SEED + 1, 6, lambda degrees: degrees.world <= 4, ep=True)[:6]


@pytest.mark.parametrize("index", one_in(2, range(len(EXPERTS))), ids=lambda index: f"{index}-{EXPERTS[index]}")
def test_a_drawn_command_with_experts_does_too(tmp_path: Path, index: int) -> None:
    check(tmp_path, draw("command-mixtures", SEED, index, EXPERTS[index]), launches=index == 0)


@pytest.mark.parametrize("index", one_in(2, range(len(DIVIDED))), ids=lambda index: f"{index}-{DIVIDED[index]}")
def test_a_drawn_command_with_divided_experts_does_too(tmp_path: Path, index: int) -> None:
    check(tmp_path, draw("command-ep-mixtures", SEED, index, DIVIDED[index]), launches=index == 0)


def check(tmp_path: Path, run: Drawn, *, launches: bool) -> None:
    """Train a drawn run by the command, or by the ranks that the command renders, next to transformers."""
    argv = prepare(run, tmp_path)
    if launches:
        code, output = commands.command(tmp_path, *argv[1:], first=forked_python.command, within_s=LIMIT_S)
        assert code == 0, output
    else:
        overrides = argv[argv.index(NAME) + 1 : argv.index("--nproc")]
        train_as_launched(commands.context(), tmp_path, TINY, overrides)
    error = error_of_command(run, tmp_path)
    assert error.is_parity, f"{error}: {shlex.join(argv)}"
