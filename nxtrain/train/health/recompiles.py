"""Detection of recompiled graphs: on an accelerator each costs minutes."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from nxtrain.backends.base import Backend
from nxtrain.common.errors import BackendError
from nxtrain.common.process.console import standard_error
from nxtrain.metrics.run_observer import RunObserver, Work

WARM_UP = 2
"""Number of times that a kind of work may compile: the first, and the second on the results of the first."""

GRAPHS: tuple[Work, ...] = ("training", "vote", "log", "evaluation", "checkpoint")
"""Kinds of work that run on the device."""

CAUSES = (
    "Usual causes: a tensor of another shape, a Python number that changed (bring it to the device with "
    "Backend.scalars), an attribute of the model that changed"
)


class Recompiles(RunObserver):
    """Attribution of compilations to the current work; while the work is new, the ranks compare their graphs."""

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
        """Attribute the compilations up to here to the current work.

        Raises:
            BackendError: The work exceeded the limit of recompilations.
        """
        compiled = self._backend.diagnostics.num_compiled()
        new, self._compiled = compiled - self._compiled, compiled
        if self._times[self._work] <= WARM_UP:
            self._backend.compare_graphs("")
        elif new:
            self._recompiled.append(str(self))
            self._report(new)

    def __str__(self) -> str:
        """Name of the current work in messages."""
        return f"step {self._step} ({self._work})"

    def _report(self, new: int) -> None:
        number, allowed = len(self._recompiled), f"compile.max_recompiles={self._limit}"
        graphs = "a new graph" if new == 1 else f"{new} new graphs"
        if number > self._limit:
            raise BackendError(
                f"{self} compiled {graphs}, recompilation {number} of this process; {allowed} allows no more. "
                f"Recompiled: {', '.join(self._recompiled)}. {CAUSES}. nxtrain graphs CONFIG --world "
                f"{self._backend.world} --steps {min(self._step, 10)} traces them on any machine; a higher "
                "compile.max_recompiles lets them pass"
            )
        before = self._times[self._work] - 1
        self._console.print(
            f"rank {self._backend.rank}: {self} compiled {graphs}, though {self._work} had been done {before} times; "
            f"recompilation {number}, {allowed} are allowed. {CAUSES}",
            style="yellow",
            markup=False,
        )
