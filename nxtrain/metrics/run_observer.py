"""Interface of observers, which follow the progress of a run on one rank without changing its computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Work = Literal["restore", "start", "data", "training", "vote", "log", "evaluation", "checkpoint"]
"""Kinds of work in a run. On devices that compile, each kind from `training` to `checkpoint` has its own graphs."""

Section = Literal["forward", "backward", "reduce", "optimizer"]
"""Sections of a training step, reported where a clock can measure the parts of a step."""

Outcome = Literal["done", "stopped", "failed"]
"""Ends of a run that the run can record itself."""


class RunObserver:
    """Observer of a run on one rank. A method that a subclass does not override does nothing.

    The main thread calls all methods, except `beat` and `stopping`, which the watchdog's threads call. The watchdog
    also calls `end` after a hang.
    """

    def begin(self, finished: int) -> None:
        """Called when training begins.

        Args:
            finished: Number of steps that were finished before this start.
        """

    def enter(self, step: int, work: Work) -> None:
        """Called when a kind of work in a step begins; the previous work has ended."""

    def section(self, name: Section) -> None:
        """Called when a section of the training step begins; the previous section has ended, as it does at `enter`."""

    def finish(self, step: int) -> None:
        """Called when a step has finished, including its evaluation and its checkpoint."""

    def measure(self, step: int) -> Mapping[str, float]:
        """Values to record with a step, requested after the step's metrics were read."""
        return {}

    def beat(self) -> None:
        """Refresh files and displays; called a few times per second."""

    def stopping(self, why: str) -> None:
        """Called when a stop of the run is requested; the ranks still have to agree on the last step.

        Args:
            why: Text with the signal, and the rank that received it.
        """

    def end(self, outcome: Outcome, why: str) -> None:
        """Called when the run ends.

        Args:
            outcome: End of the run. Of several calls, the first counts.
            why: Message of the error; empty if there is none.
        """


class Observers(RunObserver):
    """Combination of several observers; each call is passed to all of them in order."""

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
