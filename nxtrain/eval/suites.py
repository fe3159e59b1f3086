"""Suites of tasks by name: the local ones, and the recipe's for machines with a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nxtrain.config.decode import nearest
from nxtrain.errors import ConfigError, Problem
from nxtrain.eval.harness import is_installed, open_registry
from nxtrain.eval.offline import OFFLINE

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
"""Tasks by field, of the lm-evaluation-harness or ours in its YAML, with the solved examples before each question."""

SUITES = ("offline", "recipe", *RECIPE)
"""Names of suites."""


@dataclass(frozen=True)
class Choice:
    """A task that is wanted.

    Args:
        name: Name of the task.
        is_local: The task is one of the offline suite.
        num_shots: Solved examples before each question; None: as the task has it.
    """

    name: str
    is_local: bool
    num_shots: int | None = None


def choose_tasks(names: Sequence[str], folder: Path | None = None) -> tuple[list[Choice], TaskManager | None]:
    """Choose tasks by name.

    Args:
        names: Suites, local tasks, or tasks of the harness, as `NAME` or `NAME:SHOTS`; none: the offline suite.
        folder: Folder of the user's own tasks of the harness; None: there is none.

    Returns:
        The tasks, and the registry of those of the harness.

    Raises:
        ConfigError: A name is unknown, or the harness is not installed.
    """
    found: list[Choice] = []
    problems: list[Problem] = []
    for name in names or ("offline",):
        if name == "offline":
            found += [Choice(task, is_local=True) for task in OFFLINE]
        elif name in OFFLINE:
            found.append(Choice(name, is_local=True))
        elif name in SUITES:
            fields = RECIPE if name == "recipe" else {name: RECIPE[name]}
            found += [Choice(task, False, shots) for tasks in fields.values() for task, shots in tasks.items()]
        else:
            task, colon, shots = name.partition(":")
            if colon and not shots.isdecimal():
                problems.append(Problem("--tasks", f"{name}: {shots!r} is no number", hint="write NAME:SHOTS"))
            found.append(Choice(task, False, int(shots) if shots.isdecimal() else None))
    found = list(dict.fromkeys(found))
    wanted = [choice.name for choice in found if not choice.is_local]
    if wanted and not is_installed():
        # A mistyped name of a local task is as likely as a task of the harness.
        names_here = [*OFFLINE, *SUITES]
        hint = f'{nearest(wanted[0], names_here)} Others need: pip install "nxtrain[eval]"'
        reason = f"{', '.join(wanted)}: no local task, and the lm-evaluation-harness is not installed"
        raise ConfigError([*problems, Problem("--tasks", reason, hint=hint)])
    registry = open_registry(wanted, folder) if wanted else None
    known = set(registry.all_tasks) if registry else set()
    for name in wanted:
        if name not in known:
            hint = nearest(name, [*OFFLINE, *SUITES, *sorted(known)])
            problems.append(Problem("--tasks", f"{name} is no task of nxtrain or of the harness", hint=hint))
    if problems:
        raise ConfigError(problems)
    return found, registry
