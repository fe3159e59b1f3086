"""Runs that are broken on purpose, in processes that live on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.errors import NxtrainError
from nxtrain.testing import faults
from nxtrain.testing.fault_points import PatchPoint
from nxtrain.train import run
from nxtrain.train.context import RunContext


@contextmanager
def armed(text: str, run_dir: Path, rank: int) -> Iterator[None]:
    """Arm faults, and take them back."""
    undo: list[Callable[[], None]] = []
    replace = faults._replace

    def recorded(place: PatchPoint, wrapper: Any) -> None:
        owner, attribute = faults._owner(place), place.attribute
        before = getattr(owner, attribute)
        undo.append(lambda: setattr(owner, attribute, before))
        replace(place, wrapper)

    faults._replace = recorded
    try:
        if text:
            faults.arm(text, run_dir, rank)
        yield
    finally:
        faults._replace = replace
        for each in reversed(undo):
            each()


def train_broken(backend: Backend, resolved: Resolved, text: str) -> str:
    """One rank of a run with faults; how it failed, empty if it did not."""
    with armed(text, resolved.config.run.dir, backend.rank):
        try:
            run.train_on(RunContext.open(backend, resolved), "chosen by the test")
        except NxtrainError as error:
            return f"{type(error).__name__}: {error}"
    return ""
