"""Observers of a run: an observer follows the progress on one rank, and never changes what the run computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Work = Literal["restore", "start", "data", "training", "vote", "log", "evaluation", "checkpoint"]
"""Kinds of work in a run; on devices that compile, each kind from `training` to `checkpoint` has its own graphs."""

Section = Literal["forward", "backward", "reduce", "optimizer"]
"""Sections of a training step; the work `training` has them, where a clock can divide the step."""

Outcome = Literal["done", "stopped", "failed"]
"""Ends of a run that the run itself can record."""


class RunObserver:
    """Observer of a run on one rank; a method that a subclass does not override does nothing.

    The main thread calls all methods, except that the watchdog's threads call `beat` and `stopping`, and `end` after a
    hang.
    """

    def begin(self, finished: int) -> None:
        """Begin the training.

        Args:
            finished: Steps that were finished before this start.
        """

    def enter(self, step: int, work: Work) -> None:
        """Enter a piece of work of a step; the previous piece has ended."""

    def section(self, name: Section) -> None:
        """Enter a section of the training step; the previous one has ended, and the next `enter` ends this one."""

    def finish(self, step: int) -> None:
        """Finish a step with its evaluation and its checkpoint."""

    def measure(self, step: int) -> Mapping[str, float]:
        """Values to record with a step, after the step's numbers were read."""
        return {}

    def beat(self) -> None:
        """Refresh files and displays; called a few times per second."""

    def stopping(self, why: str) -> None:
        """Note that the run stops, after a step that the ranks still have to agree on.

        Args:
            why: The signal, and the rank that received it.
        """

    def end(self, outcome: Outcome, why: str) -> None:
        """End the run.

        Args:
            outcome: The first outcome counts if there are several.
            why: Message of the error; empty if there is none.
        """


class Observers(RunObserver):
    """Several observers as one; each call reaches them in their order."""

    def __init__(self, *observers: RunObserver) -> None:
        self._observers = observers

    def begin(self, finished: int) -> None:
        for observer in self._observers:
            observer.begin(finished)

    def enter(self, step: int, work: Work) -> None:
        for observer in self._observers:
            observer.enter(step, work)

    def section(self, name: Section) -> None:
        for observer in self._observers:
            observer.section(name)

    def finish(self, step: int) -> None:
        for observer in self._observers:
            observer.finish(step)

    def measure(self, step: int) -> Mapping[str, float]:
        measured: dict[str, float] = {}
        for observer in self._observers:
            measured.update(observer.measure(step))
        return measured

    def beat(self) -> None:
        for observer in self._observers:
            observer.beat()

    def stopping(self, why: str) -> None:
        for observer in self._observers:
            observer.stopping(why)

    def end(self, outcome: Outcome, why: str) -> None:
        for observer in self._observers:
            observer.end(outcome, why)
