"""Whole runs on an XLA device, sound or with code that makes new graphs, for a process of `xla_engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from nxtrain.backends.base import Backend
from nxtrain.common.errors import NxtrainError
from nxtrain.config.check import Resolved
from nxtrain.train.command import train_on
from nxtrain.train.context import RunContext
from nxtrain.train.trainer import Trainer
from tests.support.graph_mutants import MUTANTS


def endings(backend: Backend, cases: Sequence[tuple[Resolved, str]]) -> list[tuple[str, str]]:
    """Train each case, a configuration and the name of a defect; class and message of what ended it, if any."""
    found = []
    for plan, mutant in cases:
        with DEFECTS[mutant]():
            try:
                train_on(RunContext.open(backend, plan))
                found.append(("", ""))
            except NxtrainError as error:
                found.append((type(error).__name__, str(error)))
    return found


def _shrinking() -> AbstractContextManager[Any]:
    sound, steps = Trainer._put, []

    def put(self: Trainer, batch: Any) -> Any:
        steps.append(0)
        whole = sound(self, batch)
        rest = slice(-max(0, len(steps) - 2) or None)  # from the third on, each is a token shorter
        return type(whole)([x[:, rest] for x in whole.inputs], [x[:, rest] for x in whole.targets])

    return patch.object(Trainer, "_put", put)


DEFECTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "shape": _shrinking,
    "number": MUTANTS["lr"],
}
