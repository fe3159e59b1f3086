"""Detection of recompiled graphs, each of which costs minutes on an accelerator."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from nxtrain.backends.base import Backend
from nxtrain.common.errors import BackendError
from nxtrain.common.process.console import standard_error
from nxtrain.metrics.run_observer import RunObserver, Work

WARM_UP = 2
"""Number of times that a kind of work may compile: once at first, and once more on the results of the first time."""

GRAPHS: tuple[Work, ...] = ("training", "vote", "log", "evaluation", "checkpoint")
"""Kinds of work whose graphs run on the device."""

CAUSES = (
    "Usual causes: a tensor of another shape, a Python number that changed (bring it to the device with "
    "Backend.scalars), an attribute of the model that changed"
)


class Recompiles(RunObserver):
    """Observer that attributes compilations to kinds of work, and limits recompilations.

    While a kind of work is new, the ranks compare their graphs.

    Args:
        backend: This rank's device.
        limit: Largest number of recompilations (`compile.max_recompiles`).
        console: Console of the warnings; None for standard error.
    """

    def __init__(self, backend: Backend, limit: int, console: Console | None = None) -> None:
        self._backend, self._limit = backend, limit
        self._console = console or standard_error()
        self._work, self._step = "", 0
        self._times: Counter[str] = Counter()
        self._compiled = backend.diagnostics.num_compiled()
        self._recompiled: list[str] = []

    def enter(self, step: int, work: Work) -> None:
        if work not in GRAPHS:
            return
        self.settle()
        self._work, self._step = work, step
        self._times[work] += 1
        if self._times[work] <= WARM_UP:
            self._backend.compare_graphs(str(self))

    def settle(self) -> None:
        """Attribute the compilations since the last call to the current kind of work.

        Raises:
            BackendError: The number of recompilations exceeds the limit.
        """
        compiled = self._backend.diagnostics.num_compiled()
        new, self._compiled = compiled - self._compiled, compiled
        if self._times[self._work] <= WARM_UP:
            self._backend.compare_graphs("")
        elif new:
            self._recompiled.append(str(self))
            self._report(new)

    def __str__(self) -> str:
        """Step and kind of work, as text for messages."""
        return f"step {self._step} ({self._work})"

    def _report(self, new: int) -> None:
        number, allowed = len(self._recompiled), f"compile.max_recompiles={self._limit}"
        graphs = "a new graph" if new == 1 else f"{new} new graphs"
        if number > self._limit:
            raise BackendError(
                f"{self} compiled {graphs}, recompilation {number} of this process; {allowed} allows no more. "
                f"Recompiled: {', '.join(self._recompiled)}. {CAUSES}. Run nxtrain graphs CONFIG --world "
                f"{self._backend.world} --steps {min(self._step, 10)} on any machine to find the cause, or raise "
                "compile.max_recompiles to allow more recompilations"
            )
        before = self._times[self._work] - 1
        self._console.print(
            f"rank {self._backend.rank}: {self} compiled {graphs}, though {self._work} had been done {before} times; "
            f"recompilation {number}, {allowed} are allowed. {CAUSES}",
            style="yellow",
            markup=False,
        )
