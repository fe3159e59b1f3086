"""Every command of the README parses, and every configuration in it runs on the ranks that the command implies.

Blocks of commands are those without a language. A line with a placeholder in it, as in a table of commands, is held to
its options only.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from nxtrain.cli import main as cli
from nxtrain.config.check import resolve
from nxtrain.config.load import load
from nxtrain.errors import ConfigError
from nxtrain.launch.local import render

ROOT = Path(__file__).parents[2]
PROGRAMS = ("nxtrain", "torchrun", "neuron_parallel_compile", "python", "bash")
PLACEHOLDER = re.compile(r"\[|\||\b(CONFIG|RUN|CKPT|SRC|DST|N|W|R)\b")


def commands(text: str) -> Iterator[str]:
    """The commands of a text in Markdown, with their variables filled in."""
    variables: dict[str, str] = {}
    for block in re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        for line in re.findall(r'(?:"[^"]*"|[^"\n])+', block):
            if assigned := re.fullmatch(r'(\w+)="([^"]*)"', line):
                variables[assigned[1]] = assigned[2]
            elif line.split()[0] in PROGRAMS:
                yield re.sub(r"\$(\w+)", lambda found: variables[found[1]], line)


def check(command: str) -> None:
    """Hold a command to the parsers and the rules of the product.

    Raises:
        AssertionError: It has an option that is none, or is none itself.
        ConfigError: A configuration that cannot run.
    """
    if command.startswith("nxtrain ") and PLACEHOLDER.search(command.partition("#")[0]):
        _check_synopsis(command)
        return
    words = shlex.split(command, comments=True)
    if words[0] == "bash":
        assert (ROOT / words[1]).exists(), words[1]
    elif words[0] == "nxtrain":
        _check_own(words[1:], world=1)
    else:
        _check_started([word for word in words if word not in {"neuron_parallel_compile", "torchrun", "python"}])


def _check_started(words: Sequence[str]) -> None:
    agent = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name in ("--nnodes", "--nproc-per-node", "--max-restarts"):
        agent.add_argument(name, type=int, default=1)
    for name in ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"):
        agent.add_argument(name)
    if list(words[:2]) == ["-m", "nxtrain.launch.torchrun"]:
        words = words[2:]
    program = words.index("-m")
    options, unknown = agent.parse_known_args(words[:program])
    assert not unknown, unknown
    assert words[program + 1] == "nxtrain"
    _check_own(words[program + 2 :], options.nnodes * options.nproc_per_node)


def _check_own(words: Sequence[str], world: int) -> None:
    context = parse(words)
    values, name = context.params, context.info_name
    for place in (values.get("src"), values.get("dst"), values.get("where")):
        if place and str(place).endswith(".toml"):
            load(ROOT / str(place))
    if "config" not in values:
        return
    path, overrides = ROOT / values["config"], values["overrides"] or []
    if name in {"launch", "compile"}:
        first_node = values.get("first_node") or ("node0" if values["dry_run"] else "")
        render(path, overrides, values["nproc"], {"OMP_NUM_THREADS": "1"}, first_node=first_node)
    elif path.exists():
        resolve(load(path, overrides), values.get("world", world))
    else:  # one of the reader's own
        load(ROOT / "configs/base.toml", overrides)


def _check_synopsis(line: str) -> None:
    *columns, _ = re.split(r" {2,}", line)
    words = " ".join(columns).split()
    command, _ = _command(words[1:2])
    if hasattr(command, "commands"):
        choices = {choice.split()[0] for choice in " ".join(words[2:]).split("|")}
        assert choices <= command.commands.keys(), line
        return
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.strip("[]") for word in words if word.strip("[]").startswith("--")} <= known, line


def _command(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that some words call, and the words that it gets."""
    command: Any = typer.main.get_command(cli.app)
    rest = list(words)
    while rest and hasattr(command, "commands"):  # typer may bring a click of its own, so types tell nothing
        assert rest[0] in command.commands, f"no command {rest[0]}"
        command = command.commands[rest.pop(0)]
    return command, rest


def parse(words: Sequence[str]) -> Any:
    """The context of a command of nxtrain, which is not called."""
    command, rest = _command(words)
    try:
        return command.make_context(command.name, rest)
    except Exception as error:  # a wrong use, of whichever click
        raise AssertionError(repr(error)) from error


README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", list(dict.fromkeys(commands(README))))
def test_every_command_of_the_readme_would_start(command: str) -> None:
    check(command)


def test_commands_are_found_with_their_variables_and_their_comments() -> None:
    text = '```\nRUN="a.toml\n  b.c=1"\nnxtrain launch $RUN  # why\n```\n\n```python\nnxtrain x\n```\n'
    (found,) = commands(text)
    assert shlex.split(found, comments=True) == ["nxtrain", "launch", "a.toml", "b.c=1"]
    assert sum(command.startswith("nxtrain ") for command in commands(README)) > 20


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("nxtrain lunch configs/tiny_cpu.toml", AssertionError),
        ("nxtrain launch configs/tiny_cpu.toml --dryrun", AssertionError),
        ("nxtrain compile CONFIG [key=value ...] --dryrun    what it does", AssertionError),
        ("nxtrain cache    ls | verfy    what it does", AssertionError),
        ("nxtrain launch configs/tiny_cpu.toml train.stepz=3", ConfigError),
        ("nxtrain launch configs/llama2_7b_trn1.toml data.source=text data.path=/d parallel.dp=4", ConfigError),
        ("torchrun --nproc-per-node 3 -m nxtrain train configs/tiny_cpu.toml parallel.tp=2", ConfigError),
        ("torchrun --nproc-per-nod 2 -m nxtrain train configs/tiny_cpu.toml", AssertionError),
        ("nxtrain cache clean configs/none.toml", ConfigError),
        ("nxtrain train my.toml model.hff=x", ConfigError),
    ],
)
def test_a_command_that_would_not_start_is_noticed(command: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        check(command)
