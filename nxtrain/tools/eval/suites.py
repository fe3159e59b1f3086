"""Suites of evaluation tasks by name: the offline suite, and the recipe's suites for machines with a network."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.decode import nearest
from nxtrain.tools.eval.harness import is_installed, open_registry, possible_names
from nxtrain.tools.eval.offline import OFFLINE

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

RECIPE: Mapping[str, Mapping[str, int]] = {
    "mmlu": {"mmlu": 5},
    "bbh": {"bbh_cot_fewshot": 3},
    "reasoning": {
        "piqa": 0,
        "social_iqa": 0,
        "hellaswag": 0,
        "winogrande": 0,
        "arc_easy": 0,
        "arc_challenge": 0,
        "openbookqa": 0,
        "commonsense_qa": 0,
    },
    "knowledge": {"nq_open": 5, "triviaqa": 5},
    "reading": {"squadv2": 0, "quac": 0, "boolq": 0},
    "math": {"gsm8k": 8, "hendrycks_math": 4},
    "code": {"humaneval": 0, "mbpp": 3},
    "samples": {"humaneval_pass_at_1": 0, "humaneval_pass_at_k": 0},
}
"""Evaluation tasks by field, each with its number of few-shot examples.

The tasks belong to the lm-evaluation-harness, or are nxtrain's own in the harness's YAML format.
"""

SUITES = ("offline", "recipe", *RECIPE)  # names of suites


@dataclass(frozen=True)
class Choice:
    """Evaluation task that the user chose by name."""

    name: str
    is_local: bool  # the task is one of the offline suite
    num_shots: int | None = None  # few-shot examples before each question; None: the task's own number


def listed() -> str:
    """List the names of all suites and their tasks, one line for each suite."""
    suites = {"offline": OFFLINE, **{name: tuple(tasks) for name, tasks in RECIPE.items()}}
    lines = [f"{name:<10} {', '.join(tasks)}" for name, tasks in suites.items()]
    return "\n".join([*lines, f"{'recipe':<10} {', '.join(RECIPE)}", "of the harness: lm_eval ls tasks"])


def choose_tasks(names: Sequence[str], folder: Path | None = None) -> tuple[list[Choice], TaskManager | None]:
    """Resolve the names of `--tasks`: suites, local tasks, and harness tasks as `NAME` or `NAME:SHOTS`.

    Args:
        names: Names given by the user; empty: the offline suite.
        folder: Folder of the user's own harness tasks.

    Returns:
        The chosen tasks; the registry of the harness's tasks, None if there are none.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--task-dir {folder} is not a folder; give the folder that holds the tasks' YAML files")
    choices: list[Choice] = []
    problems: list[Problem] = []
    for name in names or ("offline",):
        task, colon, shots = name.partition(":")
        if name == "offline":
            choices += [Choice(task, is_local=True) for task in OFFLINE]
        elif name in OFFLINE:
            choices.append(Choice(name, is_local=True))
        elif name == "recipe":
            for field in RECIPE:
                choices += _choices_of(field)
        elif name in RECIPE:
            choices += _choices_of(name)
        elif not colon:
            choices.append(Choice(name, is_local=False))
        elif shots.isdecimal():
            choices.append(Choice(task, is_local=False, num_shots=int(shots)))
        else:
            problems.append(Problem("--tasks", f"{name}: {shots!r} is not a number", hint="write NAME:SHOTS"))
    choices = list(dict.fromkeys(choices))
    problems += _named_twice(choices)
    wanted = [choice.name for choice in choices if not choice.is_local]
    registry = None
    registered: Collection[str] = ()
    if wanted and is_installed():
        registered = possible_names(folder)
        if set(wanted) <= set(registered):
            registry = open_registry(wanted, folder)
            registered = registry.all_tasks
    problems += _missing([name for name in wanted if name not in registered], sorted(registered))
    if problems:
        raise ConfigError(problems)
    return choices, registry


def _choices_of(field: str) -> list[Choice]:
    """Evaluation tasks of one field of `RECIPE`."""
    return [Choice(task, is_local=False, num_shots=shots) for task, shots in RECIPE[field].items()]


def _missing(names: Sequence[str], choices: Sequence[str]) -> Iterator[Problem]:
    """Problems for names that neither nxtrain nor the harness has as a task."""
    others = []
    for name in names:
        if name in OFFLINE or name in SUITES:
            yield Problem("--tasks", f"{name} takes no number of solved examples", hint=f"write {name}")
        elif is_installed():
            # All names of the harness would fill many screens.
            close = get_close_matches(name, [*_NAMES, *choices], n=1, cutoff=0.8)
            hint = nearest(name, close or _NAMES)
            if not close:
                hint += "; of the harness: lm_eval ls tasks"
            yield Problem("--tasks", f"{name} is not a task of nxtrain or of the harness", hint=hint)
        else:
            others.append(name)
    if others:
        # A mistyped name of a local task is as likely as a task of the harness.
        hint = f'{nearest(others[0], _NAMES)} Others need: pip install "nxtrain[eval]"'
        reason = f"{', '.join(others)}: no local task, and the lm-evaluation-harness is not installed"
        yield Problem("--tasks", reason, hint=hint)


_NAMES = tuple(dict.fromkeys((*OFFLINE, *SUITES)))


def _named_twice(choices: Sequence[Choice]) -> Iterator[Problem]:
    """Problems for tasks that are chosen twice with different settings; results are identified by the name only."""
    ways: dict[str, list[str]] = {}
    for choice in choices:
        way = f"with {choice.num_shots} solved examples"
        if choice.is_local:
            way = "as the local task"
        elif choice.num_shots is None:
            way = "with its own number of solved examples"
        ways.setdefault(choice.name, []).append(way)
    for name in sorted(ways):
        if len(ways[name]) > 1:
            reason = f"{name} is chosen {' and '.join(ways[name])}"
            yield Problem("--tasks", reason, hint="evaluate each in a command of its own")
