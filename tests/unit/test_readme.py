"""Every command of the documentation would start: its words parse, and its configuration runs on the ranks it implies.

Blocks of commands are those without a language, and code spans that begin with `nxtrain`, `bash scripts` or
`python scripts`. A line with a placeholder in it, as in a table of commands, is checked for its options only.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import typer

from nxtrain.cli import main as cli
from nxtrain.cli import options
from nxtrain.common.errors import ConfigError
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.launch.targets.job import LaunchOptions, resolve_job
from nxtrain.launch.targets.render import RENDERERS
from nxtrain.plan.command import Question, find_layouts, length_of, predict
from tests.support import ROOT, generated_docs
from tests.support.generated_docs import GENERATED, blocks, inline_code, markdown_pages
from tests.support.launch_cases import local_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLACEHOLDER = re.compile(r"\[|\||\b(CONFIG|RUN|CKPT|SRC|DST|DIR|N|W|R)\b")
MENTIONED = "[mentioned] "
"""Before commands that a sentence names, whose arguments may be missing."""

KNOWN_ELSEWHERE = {("aws", "s3"), ("tensorboard", "--logdir"), ("vllm", "serve")}
"""Programs of others, with their options."""


def commands(text: str) -> Iterator[str]:
    """The commands of a page in Markdown, with their variables filled in."""
    variables: dict[str, str] = {}
    for language, block in blocks(text):
        for line in re.findall(r'(?:"[^"]*"|[^"\n])+', "" if language else block.replace("\\\n", " ")):
            if assigned := re.fullmatch(r'(\w+)="([^"]*)"', line):
                variables[assigned[1]] = assigned[2]
            else:
                yield re.sub(r"\$(\w+)", lambda match: variables[match[1]], line)
    for span in inline_code(GENERATED.sub("", text)):
        if re.match(r"nxtrain [a-z]|bash scripts/|python scripts/", span):
            yield f"{MENTIONED}{span}" if span.startswith("nxtrain") else span


def check(command: str) -> None:
    """Hold a command to the parsers and the rules of the product."""
    if command.startswith(MENTIONED):
        _check_synopsis(command.removeprefix(MENTIONED), is_table=False)
        return
    if command.startswith("nxtrain ") and PLACEHOLDER.search(command.partition("#")[0]):
        _check_synopsis(command)
        return
    words = shlex.split(command, comments=True)
    match words:
        case ["bash", script, *rest]:
            _check_script(script, rest)
        case ["python", script, *rest] if script.startswith("scripts/"):
            _check_script(script, rest)
        case ["python", "-m", module, *rest] if module.startswith("tests."):
            _check_script(f"{module.replace('.', '/')}.py", rest)
        case ["pip", "install", package]:
            _check_package(package)
        case ["sbatch", nodes, script, path, *overrides]:
            number = int(nodes.removeprefix("--nodes="))
            _check_script(script, ())
            _check_own(["launch", path, *overrides, f"cluster.nodes={number}", "--first-node=node0"], world=1)
        case ["nxtrain", *rest]:
            _check_own(rest, world=1)
        case ["torchrun" | "python" | "neuron_parallel_compile", *_]:
            _check_started([word for word in words if word not in {"neuron_parallel_compile", "torchrun", "python"}])
        case ["docker", "build", *options]:
            assert (ROOT / options[options.index("-f") + 1]).is_file()
        case ["docker", "run", *options]:
            _check_own(options[options.index("nxtrain") + 1 :], world=1)
        case [program, option, *_]:
            assert (program, option) in KNOWN_ELSEWHERE, f"{program} is not checked"
        case _:
            raise AssertionError(f"{command!r} is not checked")


def _check_script(script: str, words: Sequence[str]) -> None:
    """A script of the repository: it exists, and it names each option; of the test command, each lane."""
    path = ROOT / script
    assert path.is_file(), script
    source = path.read_text(encoding="utf-8")
    own = list(words)[: list(words).index("--")] if "--" in words else list(words)
    for word in own:
        assert not word.startswith("--") or re.search(rf"(?<![\w-]){word}(?![\w-])", source), f"{script} has no {word}"
    if script == "scripts/test.sh":
        lanes = re.search(r"^ +([a-z |-]+)\) lanes\+=", source, re.MULTILINE)
        assert lanes is not None
        named = [word for before, word in zip(["", *own], own, strict=False) if not before.startswith("--")]
        assert {word for word in named if word.islower() and not word.startswith("--")} <= set(lanes[1].split(" | "))


def _check_package(package: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    match = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", package)
    assert match, f"{package} is not this project"
    assert set((match[1] or "").split(",")) - {""} <= extras.keys(), package


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
    for address in (values.get("src"), values.get("dst"), values.get("where")):
        if address and str(address).endswith(".toml"):
            load(ROOT / str(address))
    if not values.get("config"):
        return
    path, overrides = ROOT / values["config"], values["overrides"] or []
    if values.get("target", "local") != "local":
        options = LaunchOptions(
            values["nproc"], values["image"], values["claim"], values["min_nodes"], values["mounts"]
        )
        assert RENDERERS[values["target"]](resolve_job(path, overrides, options))
    elif name in {"launch", "compile"}:
        first_node = values.get("first_node") or ("node0" if values["dry_run"] else "")
        local_command(path, overrides, values["nproc"], {"OMP_NUM_THREADS": "1"}, first_node=first_node)
    elif name == "plan":
        question = Question(values["instance"], values["nodes"], values["hardware"], values["model"])
        answer = find_layouts if values["search"] else predict
        answer(path, overrides, question, length_of(values["tokens"], values["dataset"], values["device_hours"]))
    elif path.exists():
        resolve_config(load(path, overrides), None if name in {"show", "doctor"} else values.get("world", world))
    else:  # one of the reader's own
        load(ROOT / "configs/base.toml", overrides)


def _check_synopsis(line: str, is_table: bool = True) -> None:
    """A line of a table, whose last column explains; or a command that a sentence names."""
    columns = re.split(r" {2,}", line)
    words = " ".join(columns[:-1] if is_table and len(columns) > 1 else columns).split()
    command, _ = _command(words[1:2])
    if hasattr(command, "commands"):
        choices = [choice.split() for choice in " ".join(words[2:]).split("|") if choice.strip()]
        assert {choice[0] for choice in choices} <= command.commands.keys(), line
        if len(choices) != 1:
            return
        command = command.commands[choices[0][0]]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word.strip("[]") for word in words if word.strip("[]").startswith("--")} <= options, line


@cache
def application() -> Any:
    """The command `nxtrain` with all its subcommands, whose making takes as long as a test."""
    return typer.main.get_command(cli.app)


def _command(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that some words call, and the words that it gets."""
    command = application()
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


PAGES = {page: page.read_text(encoding="utf-8") for page in markdown_pages()}
COMMANDS = sorted({(generated_docs.name(page), command) for page, text in PAGES.items() for command in commands(text)})


@pytest.fixture(autouse=True)
def open_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing --json reserves standard output until the process ends, which these commands share."""
    monkeypatch.setattr(options, "reserve_output", lambda: None)


@pytest.mark.parametrize("command", list(dict.fromkeys(command for _, command in COMMANDS)))
def test_every_command_of_the_documentation_would_start(command: str) -> None:
    check(command)


def test_commands_are_found_with_their_variables_and_their_comments() -> None:
    text = (
        '```\nRUN="a.toml\n  b.c=1"\nnxtrain launch $RUN  # why\nls -l\n```\n\n```text\nnxtrain x\n```\n'
        "`nxtrain cache` and `bash scripts/demo.sh`, `nxtrain/cli.py`\n"
    )
    launch, *others = commands(text)
    assert shlex.split(launch, comments=True) == ["nxtrain", "launch", "a.toml", "b.c=1"]
    assert others == ["ls -l", "[mentioned] nxtrain cache", "bash scripts/demo.sh"]


def test_every_page_with_commands_is_read() -> None:
    result = {page for page, _ in COMMANDS}
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "docs/trainium.md",
        "docs/quickstart.md",
        "tests/golden/README.md",
    } <= result
    assert len(COMMANDS) > 80


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
        ("nxtrain config show configs/tiny_cpu.toml train.stepz=3", ConfigError),
        ("[mentioned] nxtrain lunch", AssertionError),
        ("[mentioned] nxtrain bench pipelines", AssertionError),
        ("[mentioned] nxtrain bench pipeline --pq", AssertionError),
        ("bash scripts/none.sh", AssertionError),
        ("bash scripts/test.sh unitt", AssertionError),
        ("bash scripts/test.sh unit --tor 2.13.0", AssertionError),
        ("python scripts/soak.py 1 --step", AssertionError),
        ("python -m tests.support.none", AssertionError),
        ('pip install ".[none]"', AssertionError),
        ("pip install nxtrain2", AssertionError),
        ("sbatch --nodes=2 scripts/none.sbatch configs/tiny_cpu.toml", AssertionError),
        ("sbatch --nodes=2 scripts/train.sbatch configs/tiny_cpu.toml parallel.tp=5", ConfigError),
        ("ls -l", AssertionError),
    ],
)
def test_a_command_that_would_not_start_is_noticed(command: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        check(command)
