"""Detection of operations that a device lacks and its framework computes on the host: each makes a step far slower."""

from __future__ import annotations

from rich.console import Console

from nxtrain.backends.base import Backend
from nxtrain.common.errors import BackendError
from nxtrain.common.process.console import standard_error
from nxtrain.metrics.run_observer import RunObserver, Work

STEPS = 1
"""Steps after which the operations of a step are known."""


class Fallbacks(RunObserver):
    """Report of the operations that ran on the host in the first step; the step must have none unless allowed.

    Args:
        backend: Lists the operations.
        allowed: `compile.allow_fallbacks`.
        console: Console of the report; by default standard error.
    """

    def __init__(self, backend: Backend, *, allowed: bool, console: Console | None = None) -> None:
        self._backend, self._allowed = backend, allowed
        self._console = console or standard_error()
        self._trained, self._inside = 0, False

    def enter(self, step: int, work: Work) -> None:
        self._settle()
        if work == "training" and self._trained < STEPS:
            self._backend.diagnostics.forget_fallbacks()
            self._inside = True

    def finish(self, step: int) -> None:
        self._settle()

    def _settle(self) -> None:
        """Report the operations of the step that has just ended, if it is one of the first."""
        if not self._inside:
            return
        self._inside, self._trained = False, self._trained + 1
        found = self._backend.diagnostics.fallbacks()
        if not found:
            return
        said = (
            f"{self._backend.name} computes {len(found)} operations of a training step on the host, at many times the "
            f"cost of the device: {', '.join(found)}"
        )
        if not self._allowed:
            raise BackendError(
                f"{said}; compile.torch_compile=true may compile them; compile.allow_fallbacks=true goes on"
            )
        if self._backend.rank == 0:
            line = f"warning: {said}, as compile.allow_fallbacks=true allows"
            self._console.print(line, style="yellow", markup=False)
